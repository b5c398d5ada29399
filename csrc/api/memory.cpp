#include <cstring>
#include <string>

#include "api/ebbtide.h"
#include "api/guard.h"
#include "api/view.h"
#include "base/log.h"
#include "core/allocate/allocator.h"
#include "core/state/core.h"
#include "core/state/shortage.h"

// Allocations, slots, leases and captures.
using namespace ebbtide;
using api::guarded;
using api::require;

static_assert(SlotTable::kCapacity == EBBTIDE_SLOT_COUNT);

namespace {

// Runs before the first spill. Without the pool a spill only takes longer.
void fill_host_pool(int device) {
  try {
    Core::instance().host_pool.fill(device);
  } catch (const Error& error) {
    log_line(LogLevel::kWarning, {"the host pool is not full: ", error.what()});
  }
}

CUdeviceptr as_address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

// No, where there is no answer: in a forked child.
template <typename Question>
int answer(const Question& question) noexcept {
  if (is_forked_child()) return 0;
  try {
    return question() ? 1 : 0;
  } catch (...) {
    return 0;
  }
}

}  // namespace

extern "C" {

ebbtide_status ebbtide_alloc(const char* tag, const ebbtide_policy* policy, int32_t device, uint64_t size_bytes,
                             void** address, ebbtide_error* error) {
  return guarded(error, [&] {
    require(tag != nullptr, "tag is null");
    require(address != nullptr, "address is null");
    require_not_forked();  // before the registry's lock, which another thread may have held at the fork
    Core& core = Core::instance();
    *address =
        reinterpret_cast<void*>(allocate(core, core.registry.tag(tag), api::read_policy(policy), device, size_bytes));
  });
}

ebbtide_status ebbtide_free(void* address, ebbtide_error* error) {
  return guarded(error, [&] {
    if (address != nullptr) deallocate(Core::instance(), as_address(address));
  });
}

ebbtide_status ebbtide_find(const void* address, int* found, ebbtide_allocation_info* info, ebbtide_error* error) {
  return guarded(error, [&] {
    require(found != nullptr, "found is null");
    if (info != nullptr) api::require_size(info->struct_size, api::kLeastAllocationInfo, "ebbtide_allocation_info");
    require_not_forked();
    const auto allocation = Core::instance().registry.find(as_address(address));
    if (allocation != nullptr && info != nullptr) {
      api::write_struct(info, api::describe(*allocation), api::kLeastAllocationInfo, "ebbtide_allocation_info");
    }
    *found = allocation != nullptr ? 1 : 0;
  });
}

int ebbtide_is_away(const void* address, uint64_t size_bytes) {
  return answer([&] { return Core::instance().registry.is_away(as_address(address), size_bytes); });
}

int ebbtide_is_missing(const void* address, uint64_t size_bytes) {
  return answer([&] { return Core::instance().registry.is_missing(as_address(address), size_bytes); });
}

int ebbtide_find_in_handler(const void* address, char* tag, size_t capacity, int* is_away) {
  if (tag == nullptr || is_away == nullptr) return 0;
  bool away = false;
  if (!Core::instance().registry.find_in_handler(as_address(address), tag, capacity, &away)) return 0;
  *is_away = away ? 1 : 0;
  return 1;
}

ebbtide_status ebbtide_bind_slot(const char* tag, const ebbtide_policy* policy, int32_t device, int32_t* slot,
                                 ebbtide_error* error) {
  return guarded(error, [&] {
    require(tag != nullptr, "tag is null");
    require(slot != nullptr, "slot is null");
    require(device >= 0, "device is negative");
    require_not_forked();
    const Policy read = api::read_policy(policy);
    if (read.backup != BackupKind::kNone) require_store(read.backup);
    *slot = Core::instance().slots.bind(tag, read, device);
    if (read.overflow != Overflow::kNone) fill_host_pool(device);
  });
}

void* ebbtide_slot_alloc(int32_t slot, uint64_t size_bytes, void* stream) {
  return ebbtide_slot_alloc_or_error(slot, size_bytes, stream, nullptr);
}

void* ebbtide_slot_alloc_or_error(int32_t slot, uint64_t size_bytes, void* stream, ebbtide_error* error) {
  ebbtide_error found = EBBTIDE_ERROR_INIT;
  void* address = nullptr;
  const ebbtide_status status = guarded(&found, [&] {
    const SlotBinding* binding = Core::instance().slots.find(slot);
    require(binding != nullptr, "this slot was never bound");
    address = reinterpret_cast<void*>(
        allocate(Core::instance(), *binding->tag, binding->policy, binding->device, size_bytes, stream));
  });
  // Out of memory is the caller's business (torch raises it); anything else would be lost without a line.
  if (status != EBBTIDE_OK && status != EBBTIDE_OUT_OF_MEMORY)
    log_line(LogLevel::kWarning, {"an allocation failed: ", found.message});
  if (status != EBBTIDE_OK && error != nullptr && error->struct_size >= api::kLeastError)
    api::write_struct(error, found, api::kLeastError, "ebbtide_error");
  return address;
}

void ebbtide_slot_free(void* address) {
  if (address == nullptr || is_forked_child()) return;
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  const ebbtide_status status = guarded(&error, [&] { deallocate(Core::instance(), as_address(address)); });
  if (status != EBBTIDE_OK) log_line(LogLevel::kWarning, {"a free failed: ", error.message});
}

ebbtide_status ebbtide_open_lease(const char* tag, const char* holder, ebbtide_lease* lease, ebbtide_error* error) {
  return guarded(error, [&] {
    require(tag != nullptr, "tag is null");
    require(lease != nullptr, "lease is null");
    api::require_size(lease->struct_size, api::kLeastLease, "ebbtide_lease");
    require_not_forked();
    const LeaseInfo info = open_lease(Core::instance(), tag, holder != nullptr ? holder : "somebody");
    const ebbtide_lease filled = {sizeof filled, info.id, info.epoch, info.is_away ? 1 : 0};
    api::write_struct(lease, filled, api::kLeastLease, "ebbtide_lease");
  });
}

ebbtide_status ebbtide_close_lease(uint64_t id, ebbtide_error* error) {
  return guarded(error, [&] {
    if (!is_forked_child()) Core::instance().registry.close_lease(id);
  });
}

uint64_t ebbtide_last_lease(void) { return is_forked_child() ? 0 : Core::instance().registry.last_lease(); }

ebbtide_status ebbtide_begin_capture(ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    Core::instance().capture_gate.begin_capture();
  });
}

ebbtide_status ebbtide_end_capture(ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    Core& core = Core::instance();
    core.capture_gate.end_capture();
    give_back_caches(core);
  });
}

}  // extern "C"
