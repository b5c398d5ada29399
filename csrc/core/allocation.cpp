#include "core/allocation.h"

#include <algorithm>

namespace ebbtide {

const std::shared_ptr<Backing>& Backing::nothing() {
  static const auto* const instance = new std::shared_ptr<Backing>(std::make_shared<Backing>());
  return *instance;
}

size_t Allocation::device_bytes() const {
  size_t total = 0;
  for (const Chunk& chunk : chunks) total += chunk.is_on_device() ? chunk.size_bytes : 0;
  return total;
}

size_t Allocation::host_bytes() const {
  size_t total = 0;
  for (const Chunk& chunk : chunks) total += chunk.is_on_host() ? chunk.size_bytes : 0;
  return total;
}

size_t Allocation::resident_bytes() const {
  size_t total = 0;
  for (const Chunk& chunk : chunks) total += chunk.is_resident() ? chunk.size_bytes : 0;
  return total;
}

bool Allocation::is_any_stored() const {
  return std::any_of(chunks.begin(), chunks.end(),
                     [](const Chunk& chunk) { return chunk.place.load() == Place::kStored; });
}

bool Allocation::has_stale_memory() const {
  return std::any_of(chunks.begin(), chunks.end(), [](const Chunk& chunk) { return chunk.has_stale_memory(); });
}

bool Allocation::has_memory() const {
  return std::any_of(chunks.begin(), chunks.end(), [](const Chunk& chunk) { return chunk.backing->has_memory(); });
}

bool Allocation::may_have_memory() const {
  return std::any_of(chunks.begin(), chunks.end(), [](const Chunk& chunk) {
    return Backing::is_shared(chunk.backing) || chunk.backing->has_memory();
  });
}

const Chunk& Allocation::chunk_at(size_t offset) const {
  const auto after = std::upper_bound(chunks.begin(), chunks.end(), offset,
                                      [](size_t wanted, const Chunk& chunk) { return wanted < chunk.offset; });
  return *std::prev(after);
}

}  // namespace ebbtide
