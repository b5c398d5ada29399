#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/error.h"
#include "core/registry/registry.h"
#include "policy/placement.h"

// How new allocations come to be, on the device alone or, where their policy says so, on the host as well.
namespace ebbtide {

class Saver;

// Of all regions that overflow.
struct OverflowRules {
  static constexpr uint64_t kDefaultReserve = kUnlimited;
  std::atomic<uint64_t> reserve_bytes{
      kDefaultReserve};  // device memory that a spill leaves free; the default follows from the device's size
  uint64_t reserve_of(uint64_t total_bytes) const {
    const uint64_t bytes = reserve_bytes.load();
    return bytes == kDefaultReserve ? policy::default_reserve(total_bytes) : bytes;
  }
  // What large allocations leave of the limit to small ones. The default reserve is never what bounds it.
  uint64_t room_for_small(uint64_t limit_bytes) const {
    return policy::room_for_small(limit_bytes, reserve_bytes.load());
  }
  std::atomic<double> whole_fraction{policy::kDefaultWholeFraction};
};

policy::DeviceRoom look_at_device(Saver& saver, int device);
// The device's memory that an allocation of this size may use without a spill, bytes.
uint64_t usable_device_bytes(Saver& saver, int device, uint64_t allocation_bytes);

// What it throws where the memory would have to spill and the caller's policy flushes first.
class FlushFirst : public OutOfMemory {
 public:
  using OutOfMemory::OutOfMemory;
};

// A resident, zeroed allocation, not registered yet. size_bytes: a multiple of the granularity. The device's context is current. may_spill: false throws FlushFirst in place of a spill. Throws OutOfMemory, and
// DriverError (also with CUDA_ERROR_OUT_OF_MEMORY, where nothing may spill).
std::shared_ptr<Allocation> build_allocation(Saver& saver, Tag& tag, const Policy& policy, int device,
                                             uint64_t size_bytes, bool may_spill);

}  // namespace ebbtide
