#pragma once

#include <cstdint>
#include <vector>

// How an allocation is cut into chunks. Pure.
namespace ebbtide::policy {

// Sizes in bytes of the chunks of one allocation, in order; their sum is size_bytes. size_bytes: a multiple of granularity_bytes, not 0.
//
// Many small handles cost driver calls (16 GiB as 2 MiB handles: 0.6 s; as 64 MiB: 24 ms; as 1 GiB: 7 ms; FACTS.md, section 1); few large ones can't be given back while
// their bytes are still on the way. So what is copied has chunks of 128 MiB, what is only dropped has chunks of 1 GiB, and no allocation has more than kMaxChunks.
std::vector<uint64_t> cut_into_chunks(uint64_t size_bytes, uint64_t granularity_bytes, bool has_backup);

inline constexpr uint64_t kMaxChunks = 256;

}  // namespace ebbtide::policy
