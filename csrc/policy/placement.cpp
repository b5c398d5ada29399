#include "policy/placement.h"

#include <algorithm>
#include <bit>

namespace ebbtide::policy {

uint64_t room_for_small(uint64_t limit_bytes, uint64_t reserve_bytes) {
  const uint64_t bytes = std::min({limit_bytes / 32, 64 * kMiB, reserve_bytes / 2});
  return bytes - bytes % kSmallAllocationBytes;
}

void DeviceRoom::take(uint64_t size_bytes) {
  free_bytes = saturating_subtract(free_bytes, size_bytes);
  budget_bytes = saturating_subtract(budget_bytes, size_bytes);
}

uint64_t usable_bytes(const DeviceRoom& room, uint64_t allocation_bytes) {
  const bool takes_last = is_small(allocation_bytes);
  const uint64_t free_bytes =
      saturating_subtract(room.free_bytes, takes_last ? room.reserve_bytes / 2 : room.reserve_bytes);
  const uint64_t budget_bytes = saturating_subtract(room.budget_bytes, takes_last ? 0 : room.small_bytes);
  const uint64_t bytes = std::min(free_bytes, budget_bytes);
  return bytes - bytes % room.granularity_bytes;
}

Placement place_split(uint64_t size_bytes, uint64_t room_bytes) {
  const uint64_t device_bytes = std::min(size_bytes, room_bytes);
  return {device_bytes, size_bytes - device_bytes};
}

Placement place_whole(uint64_t size_bytes, uint64_t room_bytes) {
  const bool is_within = static_cast<double>(size_bytes) <= kWholeFraction * static_cast<double>(room_bytes);
  return is_within ? Placement{size_bytes, 0} : Placement{0, size_bytes};
}

std::vector<uint64_t> cut_for_host(uint64_t size_bytes, uint64_t granularity_bytes) {
  const uint64_t largest = round_up(kHostChunkBytes, granularity_bytes);
  std::vector<uint64_t> chunks(size_bytes / largest, largest);
  for (uint64_t left = size_bytes % largest; left > 0; left -= chunks.back()) {
    chunks.push_back(std::bit_floor(left / granularity_bytes) * granularity_bytes);
  }
  return chunks;
}

// A granularity is a power of two, and 0 where the driver did not tell it.
bool is_cut_for_host(uint64_t size_bytes, uint64_t granularity_bytes) {
  return std::has_single_bit(size_bytes) && size_bytes <= std::max(kHostChunkBytes, granularity_bytes);
}

uint64_t default_reserve(uint64_t total_bytes) { return std::min(512 * kMiB, total_bytes / 16); }

}  // namespace ebbtide::policy
