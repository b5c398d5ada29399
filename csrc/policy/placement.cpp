#include "policy/placement.h"

#include <algorithm>
#include <bit>

namespace ebbtide::policy {

uint64_t usable_bytes(const DeviceRoom& room) {
  const uint64_t bytes = std::min(saturating_subtract(room.free_bytes, room.reserve_bytes), room.budget_bytes);
  return bytes - bytes % room.granularity_bytes;
}

Placement place_split(uint64_t size_bytes, uint64_t room_bytes) {
  const uint64_t device_bytes = std::min(size_bytes, room_bytes);
  return {device_bytes, size_bytes - device_bytes};
}

Placement place_whole(uint64_t size_bytes, uint64_t room_bytes, double fraction) {
  const bool is_small = static_cast<double>(size_bytes) <= fraction * static_cast<double>(room_bytes);
  return is_small && size_bytes <= room_bytes ? Placement{size_bytes, 0} : Placement{0, size_bytes};
}

std::vector<uint64_t> cut_for_host(uint64_t size_bytes, uint64_t granularity_bytes) {
  const uint64_t largest = round_up(kHostChunkBytes, granularity_bytes);
  std::vector<uint64_t> chunks(size_bytes / largest, largest);
  for (uint64_t left = size_bytes % largest; left > 0; left -= chunks.back()) {
    chunks.push_back(std::bit_floor(left / granularity_bytes) * granularity_bytes);
  }
  return chunks;
}

uint64_t default_reserve(uint64_t total_bytes) { return std::min(512 * kMiB, total_bytes / 16); }

}  // namespace ebbtide::policy
