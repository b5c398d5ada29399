#pragma once

#include <cstdint>

#include "base/bytes.h"

// How many threads share a copy between device and store, and how they cut the pinned ring. Pure.
//
// Measured (H200, 16 cores, 15 GiB over a link of 55 GB/s): into memory that is there, and out of it, 8 threads with slots of 8 MiB reach the link at the least CPU time; more threads, or slots of
// 4 MiB, gain nothing. Into fresh memory, which the kernel clears at first touch, every core helps, and large slots fall out of the caches: 362 ms with 16 threads of 4 MiB slots, 583 to 680 with 8 MiB.
// Two copies at once, as in a swap: 384 ms with 8 threads each of 4 MiB slots, 473 with 8 MiB.
namespace ebbtide::policy {

inline constexpr uint64_t kSmallSlotBytes = 4 * kMiB;
inline constexpr uint64_t kLargeSlotBytes = 8 * kMiB;
inline constexpr int kSlotsPerThread = 2;
inline constexpr int kMaxCopyThreads = 16;
inline constexpr int kMaxThreadsWithoutClearing = 8;

struct CopyNeed {
  uint64_t bytes = 0;        // through the ring
  uint64_t fresh_bytes = 0;  // of which into memory of the store that nobody has touched yet
  int cores = 1;             // for this copy
  int wanted_threads = 0;    // instead of what the cores say; 0 for none
  bool is_shared = false;    // another copy goes on at once, as in a swap: the rings share the caches
};

struct CopyPlan {
  int threads = 1;
  uint64_t slot_bytes = kSmallSlotBytes;
  int slots_per_thread = kSlotsPerThread;
  uint64_t ring_bytes() const { return slot_bytes * static_cast<uint64_t>(slots_per_thread * threads); }
};

// The ring to have: enough for these bytes whether they are fresh or not, so that the next copy of them needs no other one.
uint64_t wanted_ring_bytes(const CopyNeed& need);
// What to do with a ring of this size, of at least a small slot; it may be larger or smaller than the wanted one.
CopyPlan plan_copy(const CopyNeed& need, uint64_t ring_bytes);

}  // namespace ebbtide::policy
