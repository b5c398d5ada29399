#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/memory/deferred_frees.h"
#include "core/registry/registry.h"
#include "driver/peers.h"

namespace ebbtide {

// Lets the devices of the process use each other's memory (driver/peers.h says which): all that is mapped is mapped for the peers of its device as well, and when another device comes alive, what was mapped before
// that is caught up with. A device can always do without its peers: what the driver refuses them is said on stderr, and no call fails of it.
//
// A generation is a set of live devices. Whoever maps memory notes the generation first, takes the peers then, and catches up once the memory can be found in the registry and nobody holds it: so memory that
// was in nobody's sight while others caught up is not forgotten. Nothing here waits for an operation (invariant 12): what one holds is left to it, and it catches up when it ends.
class PeerAccess {
 public:
  PeerAccess(Registry& registry, DeferredFrees& frees) : registry_(registry), frees_(frees) {}

  // Looks which devices are alive and catches up where there are more than before; the generation. Harmless beside captures. must_retry: also with what was refused before.
  uint64_t refresh(bool must_retry) noexcept;
  uint64_t generation() const noexcept { return generation_.load(); }
  // Does nothing while the generation is still `seen` and all have caught up with it.
  void catch_up(uint64_t seen) noexcept;
  // For who held tags until now: whoever caught up meanwhile has left them out, also where the generation is still `seen`.
  void catch_up_after_hold(uint64_t seen) noexcept;

  // Who may use memory of this device beside itself, as of the generation.
  DeviceSet of(int device) noexcept;
  // Maps it for the device, and for its peers as far as the driver allows. Throws DriverError.
  Mapping map(CUdeviceptr address, const PhysicalMemory& memory, int device, const DeviceSet& peers);

  // The program has enabled peer access from this device, whatever context it did so in. Throws DriverError where memory that is mapped can't be given to it.
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
  std::atomic<bool> is_any_left_{false};  // the last visit, or the one under way, left out what others hold
  std::atomic<bool> has_refused_{false};  // for good: what was refused may be where no visit finds it yet
};

}  // namespace ebbtide
