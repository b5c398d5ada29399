#include "core/budget/device_budget.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "base/settings.h"
#include "vmm/deferred_undos.h"

namespace ebbtide {

DeviceCharge DeviceCharge::split(uint64_t part_bytes) {
  DeviceCharge part;
  part.budget_ = budget_;
  part.part_ = {part_.device, part_.holder, std::min(part_bytes, part_.bytes)};
  part_.bytes -= part.part_.bytes;
  return part;
}

void DeviceBudget::give_back(const DevicePart& part) noexcept {
  on(part.device).bytes.fetch_sub(part.bytes);
  if (part.holder == DeviceHolder::kProgram) on(part.device).of_program.fetch_sub(part.bytes);
}

DeviceCharge DeviceBudget::charge(int device, uint64_t size_bytes, uint64_t spared_bytes) {
  DeviceCharge made = charge_provisionally(device, size_bytes, spared_bytes);
  note_peak(device);
  return made;
}

DeviceCharge DeviceBudget::charge_provisionally(int device, uint64_t size_bytes, uint64_t spared_bytes,
                                                DeviceHolder holder) {
  if (device < 0 || device >= kMaxDevices) throw InvalidArgument("there is no device " + std::to_string(device));
  const std::lock_guard lock(mutex_);
  require_room(device, size_bytes, spared_bytes, holder);
  on(device).bytes.fetch_add(size_bytes);
  if (holder == DeviceHolder::kProgram) on(device).of_program.fetch_add(size_bytes);
  return {*this, {device, holder, size_bytes}};
}

void DeviceBudget::require_room(int device, uint64_t size_bytes, uint64_t spared_bytes, DeviceHolder holder) const {
  const auto refused = [&](uint64_t room) {
    return "device " + std::to_string(device) + ": " + format_amount(size_bytes) + " wanted, " + format_bytes(room);
  };
  const uint64_t limit = own_limit_bytes(), lms_limit = lms_limit_bytes();
  const uint64_t room = saturating_subtract(limit, saturating_add(held_bytes(device), spared_bytes));
  const uint64_t lms_room = saturating_subtract(lms_limit, saturating_add(held_by_core(device), spared_bytes));
  const bool exceeds = limit != kUnlimited && size_bytes > room;
  if (holder == DeviceHolder::kCore && lms_limit != kUnlimited && size_bytes > lms_room &&
      !(exceeds && room < lms_room)) {
    throw OutOfMemory(refused(lms_room) + " left of the limit of large model support, " + format_bytes(lms_limit) +
                          ". Raise its limit, or take a smaller step",
                      device, {size_bytes, lms_room, lms_limit}, Cause::kLmsLimit);
  }
  if (!exceeds) return;
  throw OutOfMemory(refused(room) + " left of device_limit " + format_bytes(limit) + " (" +
                        source_of(Setting::kDeviceLimit) + "). Pause a tag, or raise " +
                        how_to_change(Setting::kDeviceLimit),
                    device, {size_bytes, room, limit}, Cause::kDeviceLimit);
}

void DeviceBudget::note_peak(int device) noexcept {
  const uint64_t held_now = on(device).bytes.load();
  uint64_t before = on(device).peak_bytes.load();
  while (held_now > before && !on(device).peak_bytes.compare_exchange_weak(before, held_now)) {
  }
}

uint64_t DeviceBudget::held_bytes(int device) const {
  if (device < 0 || device >= kMaxDevices) return 0;
  return on(device).bytes.load() + deferred_undos::held_bytes(device);
}

uint64_t DeviceBudget::peak_bytes(int device) const {
  return device < 0 || device >= kMaxDevices ? 0 : on(device).peak_bytes.load();
}

void DeviceBudget::reset_peaks() noexcept {
  const std::lock_guard lock(mutex_);
  for (Held& held : held_) held.peak_bytes.store(held.bytes.load());
}

uint64_t DeviceBudget::held_by_core(int device) const {
  return saturating_subtract(held_bytes(device), on(device).of_program.load());
}

uint64_t DeviceBudget::available_bytes(int device) const {
  const auto left = [](uint64_t limit, uint64_t held) {
    return limit == kUnlimited ? kUnlimited : saturating_subtract(limit, held);
  };
  return std::min(left(own_limit_bytes(), held_bytes(device)), left(lms_limit_bytes(), held_by_core(device)));
}

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
