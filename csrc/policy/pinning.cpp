#include "policy/pinning.h"

#include "base/bytes.h"

namespace ebbtide::policy {
namespace {

constexpr uint64_t kMostPauseBytes = uint64_t{1} << 30;
constexpr uint64_t kMostPinnedShare = 8;  // an eighth
constexpr uint64_t kMostTakenShare = 8;

}  // namespace

bool is_small_pause(uint64_t backup_bytes) { return backup_bytes <= kMostPauseBytes; }

uint64_t takeable_bytes(uint64_t available_bytes) { return available_bytes / kMostTakenShare; }

bool has_room_to_pin(uint64_t size_bytes, uint64_t pinned_bytes, uint64_t ram_bytes) {
  return size_bytes <= saturating_subtract(ram_bytes / kMostPinnedShare, pinned_bytes);
}

}  // namespace ebbtide::policy
