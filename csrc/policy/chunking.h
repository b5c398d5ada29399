#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/bytes.h"

// How an allocation is cut into chunks. Pure.
namespace ebbtide::policy {

// Sizes in bytes of the chunks of one allocation, in order; their sum is size_bytes. size_bytes: a multiple of granularity_bytes, not 0.
//
// Many small handles cost driver calls (16 GiB as 2 MiB handles: 0.6 s; as 64 MiB: 24 ms; as 1 GiB: 7 ms; csrc/DESIGN.md, F10); few large ones can't be given back while
// their bytes are still on the way. So what is copied has chunks of 128 MiB, what is only dropped has chunks of 1 GiB, and no allocation has more than kMaxChunks.
std::vector<uint64_t> cut_into_chunks(uint64_t size_bytes, uint64_t granularity_bytes, bool has_backup);

inline constexpr uint64_t kMaxChunks = 256;

// Chunks that come back side by side share a handle. 15 GiB of a model are 195 of torch's segments, and create, map and access of a handle for each take 15.8 ms, unmap and release 13.3; with handles
// of up to 128 MiB for neighbours 11.4 and 11.6, of 256 MiB 6.9 and 9.4, of 512 MiB 5.9 and 6.3, of 1 GiB 5.5 and 7.6 (H200, medians of 6; the bare calls).
inline constexpr uint64_t kSharedHandleBytes = kGiB;
// For tags that were swapped: in a swap a handle changes hands when its last byte has left, so it must not be long on the way. With 1 GiB on the leaving side two tags of 15 GiB took 389 ms instead of 325 (pinned).
inline constexpr uint64_t kSharedInSwapBytes = 128 * kMiB;

struct Extent {
  uint64_t address = 0;
  uint64_t size_bytes = 0;
};
// The pieces that share a handle, as their numbers, in the order of addresses: each group lies in one stretch, and has at most most_bytes where it is more than one piece. may_share: of two that lie side
// by side, by their numbers. The pieces: in any order, apart from each other.
std::vector<std::vector<size_t>> group_neighbours(const std::vector<Extent>& extents, uint64_t most_bytes,
                                                  const std::function<bool(size_t, size_t)>& may_share);

}  // namespace ebbtide::policy
