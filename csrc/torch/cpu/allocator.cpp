// The c10 allocator of regions on the CPU. allocate and the deleter run in any thread, with or without the GIL, also
// after the interpreter is gone. They never take the GIL and never wait for an operation, but where LMS's memory is
// full and LMS, which is asked then, does. They find a block by its address, because raw_deallocate passes pointers of
// any allocator.
#include "torch/cpu/allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <utility>

#include "torch/cpu/reclaim.h"
#include "torch/cpu/region_memory.h"

namespace ebbtide::cpu {

namespace {

// The allocator before ours.
c10::Allocator* ordinary = nullptr;

void give_back(void* address) {
  if (address == nullptr) return;
  Arena& arena = region_memory().arena;
  if (!arena.owns(address)) {
    if (c10::DeleterFnPtr deleter = ordinary->raw_deleter()) deleter(address);
    return;
  }
  if (is_forked_child()) return;  // the block is the parent's
  c10::profiledCPUMemoryReporter().Delete(address);
  arena.deallocate(address);
}

// Null if the pool is closed, which sets was_closed, or if there is no memory.
void* take(Pool& pool, size_t size_bytes, bool& was_closed) {
  forget_refusal();
  bool could_reclaim = can_reclaim();
  while (true) {
    void* const address = region_memory().arena.allocate(pool, size_bytes, &was_closed);
    if (address != nullptr || was_closed) return address;
    // What was evicted may lie in several places: again, as long as anything leaves.
    if (size_bytes <= kMaxRequestBytes && reclaim(round_request(size_bytes)) > 0) continue;
    if (can_reclaim()) return region_memory().arena.allocate(pool, size_bytes, &was_closed, true);
    // The reclaimer has gone meanwhile, and took its limit away before.
    if (!std::exchange(could_reclaim, false)) return nullptr;
  }
}

std::atomic<Pool*> pool_apart{nullptr};

c10::DataPtr own(const Pool& pool, void* address, size_t size_bytes) {
  if (address == nullptr) {
    c10::DataPtr other;  // for LMS's pool, not for a region of the program
    if (&pool == pool_apart.load() && take_overflow(size_bytes, &other)) return other;
    c10::profiledCPUMemoryReporter().OutOfMemory(size_bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, false, out_of_memory_message(pool, size_bytes));
  }
  // raw_allocate requires that the context is the data.
  c10::DataPtr data(address, address, &give_back, c10::Device(c10::DeviceType::CPU));
  c10::profiledCPUMemoryReporter().New(address, size_bytes);
  return data;
}

class RegionAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size_bytes) override {
    while (true) {
      Pool* const pool = region_memory().routing.current();
      if (pool == nullptr || size_bytes == 0 || is_forked_child()) return ordinary->allocate(size_bytes);
      bool was_closed = false;
      void* const address = take(*pool, size_bytes, was_closed);
      if (was_closed) continue;
      c10::DataPtr data = own(*pool, address, size_bytes);
      note_taken(size_bytes);
      return data;
    }
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }
};

}  // namespace

void set_pool_apart(Pool* pool) { pool_apart.store(pool); }

void allocate_apart(size_t size_bytes, c10::DataPtr* data) {
  Pool* const pool = is_forked_child() ? nullptr : pool_apart.load();
  bool was_closed = pool == nullptr;
  void* const address = was_closed ? nullptr : take(*pool, size_bytes, was_closed);
  *data = was_closed ? ordinary->allocate(size_bytes) : own(*pool, address, size_bytes);
}

void release_apart() {
  if (Pool* const pool = is_forked_child() ? nullptr : pool_apart.load()) region_memory().arena.trim(pool);
}

uint64_t used_bytes() { return region_memory().arena.used_bytes(); }

bool install_allocator() {
  static RegionAllocator& own = *new RegionAllocator();
  if (c10::GetCPUAllocator() == &own) return true;
  if (ordinary != nullptr)
    return false;  // another library has installed its allocator after ours; two that call each other would never end
  region_memory();
  ordinary = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&own, std::numeric_limits<uint8_t>::max());
  return c10::GetCPUAllocator() == &own;
}

}  // namespace ebbtide::cpu
