#include "policy/pinning.h"

#include "base/bytes.h"

namespace ebbtide::policy {
namespace {

constexpr uint64_t kMostPauseBytes = uint64_t{1} << 30;
constexpr uint64_t kMostAddedBytes = uint64_t{16} << 20;  // most of one of torch's segments of 20 MiB
constexpr uint64_t kLeastTouchedShare = 4;                // a quarter
constexpr uint64_t kMostPinnedShare = 8;                  // an eighth

}  // namespace

bool is_worth_pinning(const KeptBackup& kept, const PinnedShare& share) {
  if (kept.size_bytes == 0 || kept.pause_bytes > kMostPauseBytes) return false;
  const uint64_t added = saturating_subtract(kept.size_bytes, kept.touched_bytes);
  if (added > kMostAddedBytes || kept.touched_bytes < kept.size_bytes / kLeastTouchedShare) return false;
  const uint64_t room = saturating_subtract(share.ram_bytes / kMostPinnedShare, share.pinned_bytes);
  return kept.size_bytes <= room;
}

}  // namespace ebbtide::policy
