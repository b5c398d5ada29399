#pragma once

#include "policy/reported_memory.h"

namespace ebbtide::preload {

// The numbers that the program sees, computed from the driver's. device is CUDA's number, or -1 if unknown; nothing of
// the limit then counts as taken.
policy::MemoryNumbers reported(policy::MemoryNumbers driver_says, int device);

struct PciAddress {
  unsigned int domain, bus, device;
};
// CUDA's number of the device at this place. -1 if there is none, or if the program has not started the driver, which
// this call does not start.
int device_at(PciAddress place);

}  // namespace ebbtide::preload
