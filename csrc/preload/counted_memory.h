#pragma once

#include "core/budget/device_budget.h"
#include "preload/memory_map.h"

// Memory that is the driver's own and counts all the same: EBBTIDE_DEVICE_LIMIT makes the device small for all that the program takes, and what leaves must know what it took.
namespace ebbtide::preload {

using CountedMemory = MemoryMap<DeviceCharge>;

// Leaked on purpose: frees come after static destructors.
CountedMemory& counted_addresses();
CountedMemory& counted_handles();

}  // namespace ebbtide::preload
