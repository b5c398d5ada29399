#include "policy/pinning.h"

#include <algorithm>

#include "base/bytes.h"

namespace ebbtide::policy {
namespace {

constexpr uint64_t kMostPauseBytes = uint64_t{1} << 30;
constexpr uint64_t kMostPinnedShare = 8;  // an eighth
// What tensors leave free of torch's segments of 20 MiB, and some blocks of a larger one.
constexpr uint64_t kMostTakenBytes = uint64_t{32} << 20;
constexpr uint64_t kMostTakenShare = 8;

}  // namespace

bool is_small_pause(uint64_t backup_bytes) { return backup_bytes <= kMostPauseBytes; }

bool is_little_to_take(uint64_t missing_bytes, uint64_t available_bytes) {
  return missing_bytes <= std::min(kMostTakenBytes, available_bytes / kMostTakenShare);
}

bool has_room_to_pin(uint64_t size_bytes, uint64_t pinned_bytes, uint64_t ram_bytes) {
  return size_bytes <= saturating_subtract(ram_bytes / kMostPinnedShare, pinned_bytes);
}

}  // namespace ebbtide::policy
