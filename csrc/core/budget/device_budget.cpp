#include "core/budget/device_budget.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "base/settings.h"
#include "vmm/deferred_undos.h"

namespace ebbtide {

DeviceCharge& DeviceCharge::operator=(DeviceCharge&& other) noexcept {
  if (this == &other) return *this;
  reset();
  budget_ = std::exchange(other.budget_, nullptr);
  device_ = other.device_;
  holder_ = other.holder_;
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  return *this;
}

void DeviceCharge::reset() noexcept {
  if (budget_ != nullptr) {
    budget_->held_bytes_[static_cast<size_t>(device_)].fetch_sub(size_bytes_);
    if (holder_ == DeviceHolder::kProgram)
      budget_->held_by_program_[static_cast<size_t>(device_)].fetch_sub(size_bytes_);
  }
  budget_ = nullptr;
  size_bytes_ = 0;
}

DeviceCharge DeviceCharge::split(uint64_t part_bytes) {
  const uint64_t part = std::min(part_bytes, size_bytes_);
  size_bytes_ -= part;
  return DeviceCharge(budget_, device_, holder_, part);
}

void DeviceCharge::merge(DeviceCharge&& other) noexcept {
  if (other.budget_ == nullptr) return;
  budget_ = std::exchange(other.budget_, nullptr);
  device_ = other.device_;
  holder_ = other.holder_;
  size_bytes_ += std::exchange(other.size_bytes_, 0);
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
  held_bytes_[static_cast<size_t>(device)].fetch_add(size_bytes);
  if (holder == DeviceHolder::kProgram) held_by_program_[static_cast<size_t>(device)].fetch_add(size_bytes);
  return DeviceCharge(this, device, holder, size_bytes);
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
    throw OutOfMemory(refused(lms_room) + " left of what large model support allows, " + format_bytes(lms_limit) +
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
  const uint64_t held_now = held_bytes_[static_cast<size_t>(device)].load();
  std::atomic<uint64_t>& peak = peak_bytes_[static_cast<size_t>(device)];
  uint64_t before = peak.load();
  while (held_now > before && !peak.compare_exchange_weak(before, held_now)) {
  }
}

uint64_t DeviceBudget::held_bytes(int device) const {
  if (device < 0 || device >= kMaxDevices) return 0;
  return held_bytes_[static_cast<size_t>(device)].load() + deferred_undos::held_bytes(device);
}

uint64_t DeviceBudget::peak_bytes(int device) const {
  return device < 0 || device >= kMaxDevices ? 0 : peak_bytes_[static_cast<size_t>(device)].load();
}

void DeviceBudget::reset_peaks() noexcept {
  const std::lock_guard lock(mutex_);
  for (size_t device = 0; device < peak_bytes_.size(); ++device) peak_bytes_[device].store(held_bytes_[device].load());
}

uint64_t DeviceBudget::held_by_core(int device) const {
  return saturating_subtract(held_bytes(device), held_by_program_[static_cast<size_t>(device)].load());
}

uint64_t DeviceBudget::available_bytes(int device) const {
  const auto left = [](uint64_t limit, uint64_t held) {
    return limit == kUnlimited ? kUnlimited : saturating_subtract(limit, held);
  };
  return std::min(left(own_limit_bytes(), held_bytes(device)), left(lms_limit_bytes(), held_by_core(device)));
}

}  // namespace ebbtide
