#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/memory/deferred_frees.h"
#include "core/registry/registry.h"
#include "driver/peers.h"

namespace ebbtide {

// Lets the devices of the process use each other's memory (see driver/peers.h); a refusal is logged, and no call fails.
// A generation is a set of live devices: when another one becomes live, earlier mappings catch up. To map memory: read
// the generation, fetch the peers, map, register, then call catch_up(). Nothing here waits for an operation (invariant
// 12), which catches up with its own allocations when it ends.
class PeerAccess {
 public:
  PeerAccess(Registry& registry, DeferredFrees& frees) : registry_(registry), frees_(frees) {}

  // Finds the live devices, and catches up where there are more than before. Returns the generation. Harmless during
  // captures. must_retry: also retries accesses that were refused before.
  uint64_t refresh(bool must_retry) noexcept;
  uint64_t generation() const noexcept { return generation_.load(); }
  // Does nothing while the generation is still `seen` and everything has caught up with it.
  void catch_up(uint64_t seen) noexcept;
  // The same after holding tags: a visit meanwhile has left them out, even if the generation is still `seen`.
  void catch_up_after_hold(uint64_t seen) noexcept;

  // The other devices that may use memory of this one, as of the generation.
  DeviceSet of(int device) noexcept;
  // Maps it for the device, and for its peers as far as the driver allows. Throws DriverError.
  Mapping map(CUdeviceptr address, const PhysicalMemory& memory, int device, const DeviceSet& peers);

  // The program has enabled peer access from this device, whatever context it did so in. Throws DriverError where
  // memory that is mapped can't be given to it.
  void enable(int device);

 private:
  uint64_t look() noexcept;
  CUresult grant_all() noexcept;
  CUresult grant(Allocation& allocation) noexcept;

  Registry& registry_;
  DeferredFrees& frees_;
  std::mutex visit_mutex_;  // one visit at a time; taken before all others
  std::mutex mutex_;        // of the sets; held for no call
  DeviceSet live_;
  DeviceSet enabled_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<uint64_t> visited_{0};      // the generation that all have caught up with
  std::atomic<bool> is_any_left_{false};  // the last visit, or the one under way, left out held allocations
  std::atomic<bool> has_refused_{false};  // for good: an access may have been refused where no visit finds it yet
};

}  // namespace ebbtide
