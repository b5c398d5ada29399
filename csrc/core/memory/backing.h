#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "core/budget/device_budget.h"
#include "core/budget/host_budget.h"
#include "vmm/address_arena.h"
#include "vmm/mapping.h"
#include "vmm/physical_memory.h"

namespace ebbtide {

// What stands behind one chunk, or behind several that lie side by side: memory of one handle, mapped as a whole. It goes with the last of its chunks; those that share it leave and return
// together, so that all of them are resident or none. An operation that holds some of them may change it; who has a chunk that no operation holds, since its allocation was freed, reads it only where
// it has it alone.
struct Backing {
  // Of all its chunks, where they share it: nobody else gets these addresses while the mapping covers them, even if a chunk's allocation was freed.
  std::vector<std::shared_ptr<const Addresses>> addresses;
  // In the order in which they are made; destroyed in reverse. There is one of the two charges: that of the memory.
  DeviceCharge charge;
  HostCharge host_charge;
  PhysicalMemory memory;
  Mapping mapping;

  // What stands behind all chunks that have nothing: no operation changes it.
  static const std::shared_ptr<Backing>& nothing();
  static bool is_shared(const std::shared_ptr<Backing>& backing) {
    if (backing == nothing()) return false;
    if (backing.use_count() > 1) return true;
#ifndef __SANITIZE_THREAD__                               // which knows no fences
    std::atomic_thread_fence(std::memory_order_acquire);  // what the last of the others did to it is seen
#endif
    return false;
  }
  bool has_memory() const { return memory.has_handle(); }
  // Gives the memory back. Nothing on the device may use it any more. Throws DriverError; what was done by then stays done, and the call made again goes on from there.
  void release() {
    mapping.unmap();
    memory.release();
    charge.reset();
    host_charge.reset();
    addresses.clear();
  }
};

}  // namespace ebbtide
