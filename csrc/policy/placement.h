#pragma once

#include <cstdint>
#include <vector>

#include "base/bytes.h"

// How much of a new allocation lies on the device and how much on the host. Pure; all in bytes.
namespace ebbtide::policy {

// torch cuts all tensors of up to 1 MiB from segments of this size. Such tensors are small and read repeatedly: each
// thread block of a matrix-vector product reads the whole vector, over the bus if it is on the host.
inline constexpr uint64_t kSmallAllocationBytes = 2 * kMiB;
inline bool is_small(uint64_t allocation_bytes) { return allocation_bytes <= kSmallAllocationBytes; }

// The part of device_limit that large allocations leave to small ones: 1/32 of it, at most 64 MiB and half the reserve,
// in whole small allocations.
uint64_t room_for_small(uint64_t limit_bytes, uint64_t reserve_bytes);

struct DeviceRoom {
  uint64_t free_bytes = 0;             // as the driver reports, less device_margin
  uint64_t reserve_bytes = 0;          // of these, left to others; small allocations leave half of it
  uint64_t budget_bytes = kUnlimited;  // left by device_limit
  uint64_t small_bytes = 0;            // of these, left to small allocations
  uint64_t granularity_bytes = 2 * kMiB;

  void take(uint64_t size_bytes);
};
// The bytes that an allocation of this size may take without a spill: a multiple of the granularity.
uint64_t usable_bytes(const DeviceRoom& room, uint64_t allocation_bytes);

// The front lies on the device, the rest on the host.
struct Placement {
  uint64_t device_bytes = 0;
  uint64_t host_bytes = 0;
};
// size_bytes: a multiple of the granularity; room_bytes: of usable_bytes().
Placement place_split(uint64_t size_bytes, uint64_t room_bytes);
// All of it on the host if it is larger than kWholeFraction of the room, else all of it on the device.
Placement place_whole(uint64_t size_bytes, uint64_t room_bytes);
inline constexpr double kWholeFraction = 0.6;

// Sizes of host chunks, in order, whose sum is size_bytes: 64 MiB each, and the rest in powers of two of the
// granularity. The few different sizes let allocations reuse each other's chunks.
std::vector<uint64_t> cut_for_host(uint64_t size_bytes, uint64_t granularity_bytes);
inline constexpr uint64_t kHostChunkBytes = 64 * kMiB;
// Whether it is one of these sizes. Demoted chunks have others as well.
bool is_cut_for_host(uint64_t size_bytes, uint64_t granularity_bytes);

// min(512 MiB, a sixteenth of the device).
uint64_t default_reserve(uint64_t total_bytes);

}  // namespace ebbtide::policy
