#include "policy/pinning.h"

#include "base/bytes.h"

namespace ebbtide::policy {
namespace {

constexpr uint64_t kMostPauseBytes = uint64_t{1} << 30;
constexpr uint64_t kMostPinnedShare = 8;  // an eighth

}  // namespace

bool is_worth_pinning(const KeptBackup& kept, const PinnedShare& share) {
  if (kept.size_bytes == 0 || kept.pause_bytes > kMostPauseBytes) return false;
  const uint64_t room = saturating_subtract(share.ram_bytes / kMostPinnedShare, share.pinned_bytes);
  return kept.size_bytes <= room;
}

}  // namespace ebbtide::policy
