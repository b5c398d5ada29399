#include "core/budget/device_margin.h"

#include <string>

#include "base/bytes.h"
#include "base/error.h"
#include "base/settings.h"
#include "driver/context.h"

namespace ebbtide {

DeviceMargin::Hold DeviceMargin::require_room(int device, uint64_t size_bytes) {
  if (bytes() == 0 || size_bytes == 0) return {};
  const ContextScope scope(device);
  Hold hold(mutex_);
  const uint64_t margin_bytes = bytes();
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  check(driver().cuMemGetInfo(&free_bytes, &total_bytes), "cuMemGetInfo");
  const uint64_t room_bytes = saturating_subtract(free_bytes, margin_bytes);
  if (size_bytes > room_bytes) {
    throw OutOfMemory("device " + std::to_string(device) + ": " + format_bytes(size_bytes) + " wanted, " +
                          format_bytes(free_bytes) + " free, of which device_margin keeps " +
                          format_bytes(margin_bytes) + " (" + source_of(Setting::kDeviceMargin) +
                          "). Pause a tag, free memory of this or other processes, or lower " +
                          how_to_change(Setting::kDeviceMargin),
                      device, {size_bytes, room_bytes, kUnlimited}, Cause::kDeviceMargin);
  }
  return hold;
}

}  // namespace ebbtide
