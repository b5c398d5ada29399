#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/bytes.h"

// How an allocation is cut into chunks. Pure.
namespace ebbtide::policy {

// Sizes in bytes of the chunks of one allocation, in order; their sum is size_bytes. size_bytes is a multiple of
// granularity_bytes and not 0.
//
// Many small handles cost driver calls (16 GiB as 2 MiB handles: 0.6 s; as 64 MiB: 24 ms; as 1 GiB: 7 ms;
// csrc/DESIGN.md, F10). A large handle can't be freed while any of its bytes are still being copied. So allocations
// that are copied have chunks of 128 MiB, and those that are only dropped have chunks of 1 GiB. Those that other
// processes may have, where each handle is a descriptor that is made and sent, have chunks of 2 GiB. None has more than
// kMaxChunks, unless the driver permits no handles of more than most_bytes.
std::vector<uint64_t> cut_into_chunks(uint64_t size_bytes, uint64_t granularity_bytes, uint64_t chunk_bytes,
                                      uint64_t most_bytes = UINT64_MAX);

inline constexpr uint64_t kCopiedChunkBytes = 128 * kMiB;
inline constexpr uint64_t kDroppedChunkBytes = kGiB;
inline constexpr uint64_t kExportableChunkBytes = 2 * kGiB;
inline constexpr uint64_t kMaxChunks = 253;  // the kernel lets a message have no more descriptors

// Chunks that come back side by side share a handle. The 15 GiB of a model are 195 of torch's segments. With a handle
// for each, create, map and access take 15.8 ms, and unmap and release 13.3 ms. With handles of up to 128 MiB for
// neighbours they take 11.4 and 11.6 ms, with 256 MiB 6.9 and 9.4, with 512 MiB 5.9 and 6.3, with 1 GiB 5.5 and 7.6
// (H200, medians of 6, bare calls).
inline constexpr uint64_t kSharedHandleBytes = kGiB;
// For tags that were swapped. In a swap a handle changes hands when its last byte has left, so a handle must not take
// long to copy. With 1 GiB on the leaving side, two tags of 15 GiB took 389 ms instead of 325 (pinned).
inline constexpr uint64_t kSharedInSwapBytes = 128 * kMiB;

// The most behind one handle of what comes back, where limit_bytes are allowed. The bus stands still until the first
// handle is mapped, and once more until the last one is released, so an eighth of what is copied is the most, and what
// a swap shares the least: with 128 MiB in place of one handle, 512 MiB leave in 0.96 and return in 0.92 of the time
// (H100, medians of 21, no result file). Where less than an eighth is copied, calls count for more, of which there had
// better be few.
uint64_t most_shared_bytes(uint64_t copied_bytes, uint64_t total_bytes, uint64_t limit_bytes);

struct Extent {
  uint64_t address = 0;
  uint64_t size_bytes = 0;
};
// The pieces that share a handle, by their numbers, in the order of addresses. Each group is contiguous, and has at
// most most_bytes unless it is a single piece. may_share says whether two neighbours, given by their numbers, may be in
// one group. The pieces come in any order and do not overlap.
std::vector<std::vector<size_t>> group_neighbours(const std::vector<Extent>& extents, uint64_t most_bytes,
                                                  const std::function<bool(size_t, size_t)>& may_share);

}  // namespace ebbtide::policy
