#pragma once

#include "driver/driver.h"
#include "kernels/blocks.h"

namespace ebbtide {

// The kernels of kernels/, loaded once for each device's primary context and kept.
class DeviceKernels {
 public:
  // Null if they can't be loaded, which is logged once for each device; the caller works without them. A driver that
  // refuses the image is not asked again. After any other failure, such as a lack of memory, the next call tries again.
  //
  // The first call for a device makes driver calls that break a stream capture and may take long. So operations call
  // it, but never malloc or free.
  static const DeviceKernels* of(int device) noexcept;

  // These queue a kernel over count blocks and return. The device's primary context is current. The arrays lie in
  // memory that the device can access (pinned) and do not change until the kernel has run. Throw DriverError.
  //
  // sections: CTAs for each block, and reports of each: one, or kernels::kSections for blocks that are too few to
  // occupy the device.
  void digest(CUstream stream, const uint64_t* addresses, kernels::BlockReport* reports, kernels::Digest seed,
              uint32_t count, uint32_t sections = 1) const;
  void fill(CUstream stream, const kernels::BlockFill* fills, uint32_t count) const;
  // kernels::kLanes x lane_slots contiguous slots; board has kernels::kBoardWords words.
  void deliver(CUstream stream, const kernels::Piece* pieces, const std::byte* slots, uint32_t* board,
               uint64_t slot_bytes, uint32_t lane_slots, uint32_t count) const;

  // For tests that reset the simulator: forgets the loaded and refused kernels. None may be in use.
  static void forget_all() noexcept;

 private:
  struct Slot;
  static Slot& slot_of(int device);
  static const DeviceKernels* load(Slot& slot, int device);
  DeviceKernels(CUfunction digest, CUfunction fill, CUfunction deliver)
      : digest_(digest), fill_(fill), deliver_(deliver) {}
  void launch_with_nothing() const;

  CUfunction digest_;
  CUfunction fill_;
  CUfunction deliver_;
};

}  // namespace ebbtide
