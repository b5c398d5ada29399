#pragma once

#include "core/budget/device_budget.h"
#include "preload/memory_map.h"

// Memory that the driver owns and that still counts. EBBTIDE_DEVICE_LIMIT covers all memory that the program takes, so
// every free must know how much was taken.
namespace ebbtide::preload {

using CountedMemory = MemoryMap<DeviceCharge>;

// Leaked on purpose: frees come after static destructors.
CountedMemory& counted_addresses();
CountedMemory& counted_handles();

}  // namespace ebbtide::preload
