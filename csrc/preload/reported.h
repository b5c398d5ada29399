#pragma once

#include "policy/reported_memory.h"

namespace ebbtide::preload {

// What the program is told, from what the driver says. device: CUDA's number; -1 where it is not known: then nothing of the limit counts as taken.
policy::MemoryNumbers reported(policy::MemoryNumbers driver_says, int device);

struct PciAddress {
  unsigned int domain, bus, device;
};
// CUDA's number of the device at this place; -1 where there is none, or where the program has not started the driver: asking does not.
int device_at(PciAddress place);

}  // namespace ebbtide::preload
