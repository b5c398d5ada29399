#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/budget/host_budget.h"
#include "core/memory/host_twins.h"
#include "policy/placement.h"
#include "vmm/physical_memory.h"

namespace ebbtide {

struct Chunk;

// Host memory that a device can reach, for chunks on the host. Allocating it is slow (4.7 GB/s on an H200 host;
// csrc/DESIGN.md, F13), so the pool keeps up to its capacity for the next spill. Kept memory reads as zeros and is not
// mapped. It counts in the host budget, and is released when that budget has no room for something else.
class HostPool final : public IdleMemory {
 public:
  explicit HostPool(HostBudget& budget);
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;
  ~HostPool() override { budget_.set_idle(nullptr); }

  struct Handle {
    HostCharge charge;
    PhysicalMemory memory;
  };
  // Memory of these sizes for a device, reading as zeros: kept handles first, new ones where there are none. All or
  // nothing. Throws StoreError where the budget or the host has too little, or the driver offers no such memory;
  // DriverError. purpose: "tag 'weights'".
  std::vector<Handle> take(int device, const std::vector<uint64_t>& sizes, const std::string& purpose);
  // Returns handles that were taken and never mapped.
  void put_back(int device, std::vector<Handle> handles) noexcept;

  // Takes over the memory behind a host chunk at this address: clears and keeps it, or gives it to the system. The
  // device, which is current, must not use it any more, and no capture may be under way. Throws DriverError;
  // Backing::release() then finishes it.
  void recycle(int device, CUdeviceptr address, Chunk& chunk);

  // Allocates up to the capacity. Throws as take() does, and keeps the memory allocated by then.
  void fill(int device);
  // Memory beyond it goes to the system. Throws InvalidArgument where the machine has less RAM.
  void set_capacity(uint64_t bytes);
  uint64_t capacity_bytes() const { return capacity_bytes_.load(); }
  uint64_t kept_bytes() const { return kept_bytes_.load(); }
  size_t kept_count();
  void trim() noexcept { shrink_to(0); }
  bool give_way(uint64_t bytes) noexcept override;
  // Of chunks that came to the device; they go after the memory kept for spills.
  HostTwins& twins() { return twins_; }

 private:
  using Key = std::pair<HostLocation, uint64_t>;  // and size
  Handle make(const HostLocation& location, HostCharge charge, uint64_t size_bytes, const std::string& purpose);
  Handle take_kept(const Key& key);
  bool keep(const Key& key, Handle handle) noexcept;  // false: it has gone to the system
  bool has_room(uint64_t size_bytes) const { return kept_bytes_.load() + size_bytes <= capacity_bytes_.load(); }
  static bool is_for_spills(const Key& key) { return policy::is_cut_for_host(key.second, key.first.granularity_bytes); }
  // Handles that were made ahead for spills make room for those of a demotion, which come and go.
  void make_room_for(const Key& key);
  void shrink_to(uint64_t bytes, bool spills_only = false) noexcept;

  HostBudget& budget_;
  HostHolder& kept_holder_;
  HostHolder& spilled_holder_;
  HostTwins twins_;
  std::mutex mutex_;
  std::map<Key, std::vector<Handle>> kept_;
  std::atomic<uint64_t> kept_bytes_{0};
  std::atomic<uint64_t> capacity_bytes_{0};
};

}  // namespace ebbtide
