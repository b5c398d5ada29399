#pragma once

#include <cstdint>

#include "base/bytes.h"

// How many threads share a copy between device and store, how large a pinned ring it wants, and how large the pieces are that go over the bus. Pure.
//
// Measured (H200, 16 cores, 55 GB/s): between two copies the copy engine stands still for about 2.5 us, and longer when they are on different streams. In one stream, pieces of 4, 8, 16 and 32 MiB
// move at 53.4, 54.3, 54.8 and 55.1 GB/s. So pieces are large, and the threads share each of them: rings of 64 MiB with 16 MiB pieces did as well as any that were larger. A ring in which each of 8
// threads had two slots and a stream of its own needed 128 MiB for 54.3, and in a swap 4 MiB slots moved 90 GB/s in all where one stream each way moves 96.
// Parts of 1 and 2 MiB are alike; smaller than a huge page, and two threads clear the same fresh one.
// Emptying the ring into memory that is there takes 5 threads; filling it 8, on slow hosts 12. Into fresh memory, which the kernel clears at first touch, every core helps.
namespace ebbtide::policy {

// What a thread copies at once between the ring and memory: a huge page.
inline constexpr uint64_t kPartBytes = 2 * kMiB;
inline constexpr uint64_t kLeastRingBytes = 2 * kPartBytes;  // one part is on the bus while another is filled
inline constexpr uint64_t kLargestRingBytes = 64 * kMiB;
inline constexpr uint64_t kLargestPieceBytes = 16 * kMiB;
inline constexpr int kMaxCopyThreads = 16;
inline constexpr int kMaxThreadsWithoutClearing = 12;

struct CopyNeed {
  uint64_t bytes = 0;        // through the ring
  uint64_t fresh_bytes = 0;  // of which into memory of the store that nobody has touched yet
  int cores = 1;             // for this copy
  int wanted_threads = 0;    // instead of what the cores say; 0 for none
};

struct CopyPlan {
  int threads = 1;
  uint64_t piece_bytes = kPartBytes;
};

// The ring to have: enough for these bytes whether they are fresh or not, so that the next copy of them needs no other one.
uint64_t wanted_ring_bytes(const CopyNeed& need);
// What to do with a ring of this size, at least kLeastRingBytes; it may be larger or smaller than the wanted one.
CopyPlan plan_copy(const CopyNeed& need, uint64_t ring_bytes);

}  // namespace ebbtide::policy
