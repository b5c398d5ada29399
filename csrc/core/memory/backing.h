#pragma once

#include <memory>
#include <vector>

#include "base/shared.h"
#include "core/budget/device_budget.h"
#include "core/budget/host_budget.h"
#include "vmm/address_arena.h"
#include "vmm/mapping.h"
#include "vmm/physical_memory.h"

namespace ebbtide {

// The memory behind one chunk, or behind several neighbours: one driver handle, mapped as a whole. It is released with
// its last chunk. Chunks that share it leave and return together, so either all of them are resident or none. An
// operation that holds some of the chunks may change it. The free of an allocation reads it only where its chunk
// does not share it.
struct Backing {
  // The addresses of all its chunks, where they share it. They are not reused while the mapping covers them, even if
  // the allocation of a chunk was freed.
  std::vector<std::shared_ptr<const Addresses>> addresses;
  // Made in this order, destroyed in reverse. One of the two charges is set, depending on where the memory is.
  DeviceCharge charge;
  HostCharge host_charge;
  PhysicalMemory memory;
  Mapping mapping;

  // The shared backing of chunks without memory. No operation changes it.
  static const std::shared_ptr<Backing>& nothing();
  static bool is_shared(const std::shared_ptr<Backing>& backing) {
    return backing != nothing() && ebbtide::is_shared(backing);
  }
  bool has_memory() const { return memory.has_handle(); }
  // Gives the memory back. The device must not use it any more. Throws DriverError; the same call then continues where
  // it stopped.
  void release() {
    mapping.unmap();
    memory.release();
    charge.reset();
    host_charge.reset();
    addresses.clear();
  }
};

}  // namespace ebbtide
