#include "policy/copy_plan.h"

#include <algorithm>

namespace ebbtide::policy {
namespace {

// Of fewer bytes a thread would not earn what it takes to start it.
constexpr uint64_t kLeastBytesPerThread = 8 * kMiB;
// Beyond so much of the ring for each thread it only waits.
constexpr uint64_t kRingBytesPerThread = 16 * kMiB;
// So many pieces lie in the ring at least: one is filled, one emptied, and the bus has a next one.
constexpr uint64_t kPiecesInRing = 4;
// Before the first piece is there the other side has nothing to do: so a small copy has small pieces.
constexpr uint64_t kLeastPieces = 16;

// Of so many in a swap: filling the ring takes more than emptying it, unless that has memory to clear.
int share_of(const CopyNeed& need, bool is_fresh, int count) {
  if (!need.is_swap) return count;
  const int for_store = is_fresh ? count / 2 : count * 3 / 8;
  return need.is_to_device ? count - count * 3 / 8 : for_store;
}

int threads_of(const CopyNeed& need, bool is_fresh) {
  const int useful_cores = need.is_to_device ? kMaxThreadsToDevice : is_fresh ? kMaxCopyThreads : kMaxThreadsToStore;
  const int by_cores = std::min(share_of(need, is_fresh, need.cores / need.devices), useful_cores);
  const int wanted = share_of(need, is_fresh, need.wanted_threads / need.devices);
  const int most = std::clamp(need.wanted_threads > 0 ? wanted : by_cores, 1, kMaxCopyThreads);
  const uint64_t useful = need.bytes / kLeastBytesPerThread + 1;
  return static_cast<int>(std::min(useful, static_cast<uint64_t>(most)));
}

}  // namespace

uint64_t wanted_ring_bytes(const CopyNeed& need) {
  const int threads = std::max(threads_of(need, true), threads_of(need, false));
  const uint64_t largest_bytes = need.has_files ? kLargestFileRingBytes : kLargestRingBytes;
  const uint64_t bytes = std::min({need.bytes, largest_bytes, kRingBytesPerThread * static_cast<uint64_t>(threads)});
  return std::max(round_up(bytes, kPartBytes), kLeastRingBytes);
}

CopyPlan plan_copy(const CopyNeed& need, uint64_t ring_bytes) {
  const auto threads = static_cast<uint64_t>(threads_of(need, need.fresh_bytes > need.bytes / 2));
  const uint64_t used_bytes = std::min(ring_bytes, wanted_ring_bytes(need));
  const uint64_t largest_bytes = need.has_files ? kRequestBytes : kLargestPieceBytes;
  const uint64_t piece_bytes = std::min({used_bytes / kPiecesInRing, need.bytes / kLeastPieces, largest_bytes});
  return {.threads = static_cast<int>(std::clamp<uint64_t>(used_bytes / kPartBytes, 1, threads)),
          .ring_bytes = used_bytes,
          .piece_bytes = std::max(piece_bytes / kPartBytes * kPartBytes, kPartBytes)};
}

}  // namespace ebbtide::policy
