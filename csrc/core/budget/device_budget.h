#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "core/budget/charge.h"
#include "driver/context.h"

// How many bytes ebbtide may hold on each device, and how many it holds. It is charged before memory is taken
// (invariant 7).
namespace ebbtide {

// The owner of charged memory: the core, or the program, which gets it from the driver.
enum class DeviceHolder { kCore, kProgram };

struct DevicePart {
  int device = -1;
  DeviceHolder holder = DeviceHolder::kCore;
  uint64_t bytes = 0;
  uint64_t size_bytes() const { return bytes; }
  // other: of the same device and holder.
  void add(const DevicePart& other) noexcept { *this = {other.device, other.holder, bytes + other.bytes}; }
};

class DeviceCharge : public Charge<class DeviceBudget, DevicePart> {
 public:
  using Charge::Charge;
  // Cuts part_bytes (capped at the charge) off into a charge of its own.
  DeviceCharge split(uint64_t part_bytes);
};

class DeviceBudget : public Limits {
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
  // The room that the limits leave to the core; kUnlimited where there is none. device_limit covers all that is held;
  // large model support sees to the program's memory itself.
  uint64_t available_bytes(int device) const;

 private:
  friend Charge<DeviceBudget, DevicePart>;
  struct Held {
    std::atomic<uint64_t> bytes{0}, of_program{0}, peak_bytes{0};
  };
  Held& on(int device) { return held_[static_cast<size_t>(device)]; }
  const Held& on(int device) const { return held_[static_cast<size_t>(device)]; }
  void give_back(const DevicePart& part) noexcept;
  uint64_t held_by_core(int device) const;
  // Throws OutOfMemory, which names the limit that leaves less.
  void require_room(int device, uint64_t size_bytes, uint64_t spared_bytes, DeviceHolder holder) const;

  std::mutex mutex_;
  std::array<Held, kMaxDevices> held_;
};

// Free device memory that new allocations leave to others. Unlike a limit it bounds what the driver says is free, which
// other processes take from as well, so every allocation looks at the device anew.
class DeviceMargin {
 public:
  // Lives until the memory exists: from then on the next allocation's look at the device counts it (invariant 7).
  using Hold = std::unique_lock<std::mutex>;
  // Throws OutOfMemory where the device would have less than the margin left, DriverError where it does not say. Asks
  // nothing where there is no margin.
  Hold require_room(int device, uint64_t size_bytes);
  uint64_t bytes() const { return bytes_.load(); }
  void set_bytes(uint64_t bytes) { bytes_.store(bytes); }

 private:
  std::mutex mutex_;
  std::atomic<uint64_t> bytes_{0};
};

}  // namespace ebbtide
