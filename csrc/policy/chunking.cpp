#include "policy/chunking.h"

#include <algorithm>
#include <numeric>

#include "base/bytes.h"

namespace ebbtide::policy {

std::vector<uint64_t> cut_into_chunks(uint64_t size_bytes, uint64_t granularity_bytes, uint64_t chunk_bytes,
                                      uint64_t most_bytes) {
  chunk_bytes = round_up(chunk_bytes, granularity_bytes);
  while (size_bytes / chunk_bytes >= kMaxChunks && chunk_bytes <= most_bytes / 2) chunk_bytes *= 2;
  std::vector<uint64_t> chunks;
  chunks.reserve(size_bytes / chunk_bytes + 1);
  for (uint64_t left = size_bytes; left > 0;) {
    const uint64_t next = std::min(left, chunk_bytes);
    chunks.push_back(next);
    left -= next;
  }
  return chunks;
}

uint64_t most_shared_bytes(uint64_t copied_bytes, uint64_t total_bytes, uint64_t limit_bytes) {
  if (copied_bytes <= total_bytes / 8) return limit_bytes;
  return std::min(limit_bytes, std::max(copied_bytes / 8, kSharedInSwapBytes));
}

std::vector<std::vector<size_t>> group_neighbours(const std::vector<Extent>& extents, uint64_t most_bytes,
                                                  const std::function<bool(size_t, size_t)>& may_share) {
  std::vector<size_t> by_address(extents.size());
  std::iota(by_address.begin(), by_address.end(), size_t{0});
  std::sort(by_address.begin(), by_address.end(),
            [&](size_t a, size_t b) { return extents[a].address < extents[b].address; });
  std::vector<std::vector<size_t>> groups;
  uint64_t group_bytes = 0;
  for (const size_t number : by_address) {
    const Extent& piece = extents[number];
    const auto joins = [&](size_t last) {
      return extents[last].address + extents[last].size_bytes == piece.address &&
             group_bytes + piece.size_bytes <= most_bytes && may_share(last, number);
    };
    if (groups.empty() || !joins(groups.back().back())) {
      groups.emplace_back();
      group_bytes = 0;
    }
    groups.back().push_back(number);
    group_bytes += piece.size_bytes;
  }
  return groups;
}

}  // namespace ebbtide::policy
