#include "core/allocate/room.h"

#include "driver/context.h"

namespace ebbtide {

policy::DeviceRoom look_at_device(Core& core, int device) {
  const ContextScope scope(device);
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  check(driver().cuMemGetInfo(&free_bytes, &total_bytes), "cuMemGetInfo");
  return {.free_bytes = saturating_subtract(free_bytes, core.budgets.device_margin.bytes()),
          .reserve_bytes = core.rules.overflow.reserve_of(total_bytes),
          .budget_bytes = core.budgets.device.available_bytes(device),
          .small_bytes = core.rules.overflow.room_for_small(core.budgets.device.limit_bytes()),
          .granularity_bytes = granularity(device)};
}

uint64_t usable_device_bytes(Core& core, int device, uint64_t allocation_bytes) {
  return policy::usable_bytes(look_at_device(core, device), allocation_bytes);
}

}  // namespace ebbtide
