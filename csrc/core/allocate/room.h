#pragma once

#include <cstdint>

#include "core/state/core.h"
#include "policy/placement.h"

// The room that a device has, by the driver and by the budget.
namespace ebbtide {

policy::DeviceRoom look_at_device(Core& core, int device);
// The device's memory that an allocation of this size may use without a spill, bytes.
uint64_t usable_device_bytes(Core& core, int device, uint64_t allocation_bytes);

}  // namespace ebbtide
