#include "policy/chunking.h"

#include <algorithm>

#include "base/bytes.h"

namespace ebbtide::policy {

std::vector<uint64_t> cut_into_chunks(uint64_t size_bytes, uint64_t granularity_bytes, bool has_backup) {
  uint64_t chunk_bytes = round_up(has_backup ? 128 * kMiB : kGiB, granularity_bytes);
  while (size_bytes / chunk_bytes >= kMaxChunks) chunk_bytes *= 2;
  std::vector<uint64_t> chunks;
  chunks.reserve(size_bytes / chunk_bytes + 1);
  for (uint64_t left = size_bytes; left > 0;) {
    const uint64_t next = std::min(left, chunk_bytes);
    chunks.push_back(next);
    left -= next;
  }
  return chunks;
}

}  // namespace ebbtide::policy
