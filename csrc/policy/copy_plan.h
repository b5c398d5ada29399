#pragma once

#include <cstdint>

#include "base/bytes.h"

// The number of threads that share a copy between device and store, the size of its pinned ring, and the size of the
// pieces that go over the bus. Pure.
//
// Measured on an H200 with 16 cores, 15 GiB in 195 segments, several hosts with a link of 55 GB/s (bare programs and
// trial builds, without a result file):
// - The copy engine idles for about 2.5 us between two copies, and longer if they are on different streams. In one
//   stream, pieces of 4, 8, 16 and 32 MiB move at 53.4, 54.3, 54.8 and 55.1 GB/s. So pieces are large, and threads
//   share each of them.
// - A ring of 64 MiB with pieces of 16 MiB is best. With 48 and 32 MiB and pieces of 8, a pause takes 324 and 373 ms
//   instead of 295, since driver calls for other chunks delay the next copies for longer than those on the bus last.
//   With 96 and 128 MiB it is no faster alone, and a swap takes 461 and 535 ms instead of 341 to 410, since two such
//   rings do not fit the caches.
// - Into memory that exists, 6 or 8 threads take 295 ms (pinned memory takes 294), 10 take 298 and 12 take 303. Out of
//   memory, 6, 8, 10 and 12 threads take 313, 298, 297 and 300 ms; on a slow host 8 were too few. Into fresh memory,
//   which the kernel clears at first touch, every core helps.
// - Parts of 1 and 2 MiB perform alike. But if a huge page does not exist yet, two threads would each clear one.
namespace ebbtide::policy {

// The bytes that a thread copies at once between the ring and memory: a huge page.
inline constexpr uint64_t kPartBytes = 2 * kMiB;
inline constexpr uint64_t kLeastRingBytes = 2 * kPartBytes;  // one part is on the bus while another is filled
inline constexpr uint64_t kLargestRingBytes = 64 * kMiB;
inline constexpr uint64_t kLargestPieceBytes = 16 * kMiB;
// Requests to files are at most this large. Each takes a thread, and they end in any order, so the ring has room for
// twice as many, and a piece is one request.
inline constexpr uint64_t kRequestBytes = 8 * kMiB;
inline constexpr int kMaxCopyThreads = 16;
// Threads for copies into existing memory of the store, and out of it.
inline constexpr int kMaxThreadsToStore = 8;
inline constexpr int kMaxThreadsToDevice = 10;
// Threads if some of it is in files, in either direction.
inline constexpr int kMaxThreadsWithFiles = 8;

struct CopyNeed {
  bool is_to_device = false;
  uint64_t bytes = 0;        // through the ring
  uint64_t fresh_bytes = 0;  // of these, into memory of the store that is not touched yet
  bool has_files = false;    // some of it is in files instead of memory
  int cores = 1;             // for all copies that run at once
  int wanted_threads = 0;    // overrides the number from the cores; 0: does not
  int devices = 1;           // devices that share the cores
  bool is_swap = false;      // the other direction runs at once, and shares them too
};

struct CopyPlan {
  int threads = 1;
  uint64_t ring_bytes = kLeastRingBytes;  // the rest of a larger ring stays unused, and out of the caches
  uint64_t piece_bytes = kPartBytes;
};

// The size of the ring to make: enough for these bytes whether they are fresh or not, so that the next copy can use the
// same ring.
uint64_t wanted_ring_bytes(const CopyNeed& need);
// The plan for a ring of this size, at least kLeastRingBytes; it may differ from the wanted size.
CopyPlan plan_copy(const CopyNeed& need, uint64_t ring_bytes);

}  // namespace ebbtide::policy
