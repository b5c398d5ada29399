#include "policy/copy_plan.h"

#include <algorithm>

namespace ebbtide::policy {
namespace {

// With fewer bytes a thread would not repay the cost of starting it.
constexpr uint64_t kLeastBytesPerThread = 8 * kMiB;
// With more of the ring for each thread, the thread only waits. For requests the limit is two.
constexpr uint64_t kRingBytesPerThread = 2 * kRequestBytes;
// The pieces in a ring that is large enough: two on the bus, one being filled or emptied, and one whose last parts are.
constexpr uint64_t kPiecesInRing = 4;
// The other side is idle until the first piece arrives, so a small copy has small pieces.
constexpr uint64_t kLeastPieces = 16;

// More than any machine has, and few enough to multiply.
constexpr int kMostThreads = 1 << 16;

// The threads of this side of a swap, out of count. Filling the ring takes more than emptying it. Clearing fresh memory
// takes more than either, and the other side mostly waits for room meanwhile.
int share_of(const CopyNeed& need, bool is_fresh, int count) {
  if (!need.is_swap) return count;
  const int for_store = is_fresh ? count / 2 : count * 3 / 8;
  return need.is_to_device ? count - count * 3 / 8 : for_store;
}

int useful_threads(const CopyNeed& need, bool is_fresh) {
  if (need.has_files) return kMaxThreadsWithFiles;
  if (need.is_to_device) return kMaxThreadsToDevice;
  return is_fresh ? kMaxCopyThreads : kMaxThreadsToStore;
}

int threads_of(const CopyNeed& need, bool is_fresh) {
  const auto shared = [&](int count) { return share_of(need, is_fresh, std::min(count, kMostThreads) / need.devices); };
  const int by_cores = std::min(shared(need.cores), useful_threads(need, is_fresh));
  const int wanted = shared(need.wanted_threads);
  const int most = std::clamp(need.wanted_threads > 0 ? wanted : by_cores, 1, kMaxCopyThreads);
  const uint64_t useful = need.bytes / kLeastBytesPerThread + 1;
  return static_cast<int>(std::min(useful, static_cast<uint64_t>(most)));
}

}  // namespace

uint64_t wanted_ring_bytes(const CopyNeed& need) {
  const int threads = std::max(threads_of(need, true), threads_of(need, false));
  const uint64_t useful_bytes = kRingBytesPerThread * static_cast<uint64_t>(threads);
  const uint64_t bytes = std::min({need.bytes, useful_bytes, need.has_files ? useful_bytes : kLargestRingBytes});
  return std::max(round_up(bytes, kPartBytes), kLeastRingBytes);
}

CopyPlan plan_copy(const CopyNeed& need, uint64_t ring_bytes) {
  const auto threads = static_cast<uint64_t>(threads_of(need, need.fresh_bytes > need.bytes / 2));
  const uint64_t used_bytes = std::min(ring_bytes, wanted_ring_bytes(need));
  const uint64_t largest_bytes =
      need.has_files ? kRequestBytes : std::min(need.bytes / kLeastPieces, kLargestPieceBytes);
  const uint64_t piece_bytes = std::min(used_bytes / kPiecesInRing, largest_bytes);
  return {.threads = static_cast<int>(std::clamp<uint64_t>(used_bytes / kPartBytes, 1, threads)),
          .ring_bytes = used_bytes,
          .piece_bytes = std::max(piece_bytes / kPartBytes * kPartBytes, kPartBytes)};
}

}  // namespace ebbtide::policy
