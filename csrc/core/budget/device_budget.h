#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

#include "base/bytes.h"
#include "driver/context.h"

// How many bytes ebbtide may hold on each device, and how many it holds. It is charged before memory is taken
// (invariant 7).
namespace ebbtide {

class DeviceBudget;

// Whose memory is charged: the core's, or what the program gets from the driver.
enum class DeviceHolder { kCore, kProgram };

// Owns a charge on a device's budget; gives it back when it goes.
class DeviceCharge {
 public:
  DeviceCharge() = default;
  DeviceCharge(DeviceCharge&& other) noexcept
      : budget_(std::exchange(other.budget_, nullptr)),
        device_(other.device_),
        holder_(other.holder_),
        size_bytes_(std::exchange(other.size_bytes_, 0)) {}
  DeviceCharge& operator=(DeviceCharge&& other) noexcept;
  ~DeviceCharge() { reset(); }
  void reset() noexcept;
  // Cuts part_bytes (at most what is left) off into a charge of its own.
  DeviceCharge split(uint64_t part_bytes);
  void merge(DeviceCharge&& other) noexcept;  // of the same device and holder
  uint64_t size_bytes() const { return size_bytes_; }

 private:
  friend class DeviceBudget;
  DeviceCharge(DeviceBudget* budget, int device, DeviceHolder holder, uint64_t size_bytes)
      : budget_(budget), device_(device), holder_(holder), size_bytes_(size_bytes) {}
  DeviceBudget* budget_ = nullptr;
  int device_ = -1;
  DeviceHolder holder_ = DeviceHolder::kCore;
  uint64_t size_bytes_ = 0;
};

class DeviceBudget {
 public:
  // Throws OutOfMemory where the limit does not allow it, or would have less than spared_bytes left.
  DeviceCharge charge(int device, uint64_t size_bytes, uint64_t spared_bytes = 0);
  // For memory that the driver may refuse: it is no peak before note_peak(), which follows the driver's yes.
  DeviceCharge charge_provisionally(int device, uint64_t size_bytes, uint64_t spared_bytes = 0,
                                    DeviceHolder holder = DeviceHolder::kCore);
  void note_peak(int device) noexcept;
  uint64_t held_bytes(int device) const;
  // The most that was held since the start, or since reset_peaks().
  uint64_t peak_bytes(int device) const;
  void reset_peaks() noexcept;
  // What the limits leave to the core; kUnlimited where there is none.
  uint64_t available_bytes(int device) const;
  // The lower one of the two that follow.
  uint64_t limit_bytes() const { return std::min(limit_bytes_.load(), lms_limit_bytes_.load()); }
  // device_limit, for all that is held.
  uint64_t own_limit_bytes() const { return limit_bytes_.load(); }
  void set_limit(uint64_t bytes) { limit_bytes_.store(bytes); }
  // What large model support leaves to the core; kUnlimited while it is off. It sees to the program's memory itself.
  uint64_t lms_limit_bytes() const { return lms_limit_bytes_.load(); }
  void set_lms_limit(uint64_t bytes) { lms_limit_bytes_.store(bytes); }

 private:
  friend class DeviceCharge;
  uint64_t held_by_core(int device) const;
  // Throws OutOfMemory, which names the limit that leaves less.
  void require_room(int device, uint64_t size_bytes, uint64_t spared_bytes, DeviceHolder holder) const;

  std::mutex mutex_;
  std::array<std::atomic<uint64_t>, kMaxDevices> held_bytes_{};
  std::array<std::atomic<uint64_t>, kMaxDevices> held_by_program_{};  // of that
  std::array<std::atomic<uint64_t>, kMaxDevices> peak_bytes_{};
  std::atomic<uint64_t> limit_bytes_{kUnlimited};
  std::atomic<uint64_t> lms_limit_bytes_{kUnlimited};
};

}  // namespace ebbtide
