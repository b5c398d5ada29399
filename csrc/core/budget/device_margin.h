#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace ebbtide {

// Free device memory that new allocations leave to others. Unlike a limit it bounds what the driver says is free, which
// other processes take from as well, so every allocation looks at the device anew.
class DeviceMargin {
 public:
  // Lives until what was asked for exists: the next allocation's look at the device counts it then (invariant 7).
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
