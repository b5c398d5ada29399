#include "core/memory/allocation.h"

#include <algorithm>

namespace ebbtide {

const std::shared_ptr<Backing>& Backing::nothing() {
  static const auto* const instance = new std::shared_ptr<Backing>(std::make_shared<Backing>());
  return *instance;
}

Amounts& Amounts::operator+=(const Amounts& other) {
#define EBBTIDE_AMOUNT(name) name += other.name;
#define EBBTIDE_INNER_AMOUNT(name) EBBTIDE_AMOUNT(name)
#include "core/memory/amounts.def"
#undef EBBTIDE_AMOUNT
  for (size_t kind = 0; kind < with_backup.size(); ++kind) with_backup[kind] += other.with_backup[kind];
  return *this;
}

Amounts& Amounts::operator-=(const Amounts& other) {
#define EBBTIDE_AMOUNT(name) name -= other.name;
#include "core/memory/amounts.def"
#undef EBBTIDE_INNER_AMOUNT
#undef EBBTIDE_AMOUNT
  for (size_t kind = 0; kind < with_backup.size(); ++kind) with_backup[kind] -= other.with_backup[kind];
  return *this;
}

namespace {

// Of the blocks in this place whose backup has the flag.
size_t bytes_of_blocks(const Allocation& allocation, Place place, bool StoredBlock::* flag) {
  if (allocation.stored == nullptr) return 0;
  size_t blocks = 0;
  for (const Chunk& chunk : allocation.chunks) {
    if (chunk.place.load(std::memory_order_acquire) != place) continue;
    for (size_t block = chunk.first_block(); block < chunk.end_block(); ++block)
      blocks += allocation.stored->blocks[block].*flag ? 1 : 0;
  }
  return blocks * kernels::kBlockBytes;
}

}  // namespace

Amounts Allocation::amounts() const {
  Amounts found;
  found.allocation_count = 1;
  found.size_bytes = size_bytes();
  for (const Chunk& chunk : chunks) {
    // Read once each, so that an operation that runs now makes no byte count twice or not at all.
    const bool is_detached = chunk.is_detached.load();
    const Place place = chunk.place.load();
    const bool is_resident = (place == Place::kDevice || place == Place::kHost) && !is_detached;
    found.device_bytes += place == Place::kDevice ? chunk.size_bytes : 0;
    found.host_bytes += place == Place::kHost && is_resident ? chunk.size_bytes : 0;
    if (is_resident) {
      found.resident_bytes += chunk.size_bytes;
    } else if (place == Place::kStored) {
      found.stored_bytes += chunk.size_bytes;
    } else if (is_trimmed) {
      found.trimmed_bytes += chunk.size_bytes;
    } else {
      (place == Place::kDropped ? found.dropped_bytes : found.detached_bytes) += chunk.size_bytes;
    }
    found.retained_bytes += place == Place::kDevice && stored != nullptr ? chunk.size_bytes : 0;
  }
  const bool is_dropped = found.dropped_bytes + found.trimmed_bytes == found.size_bytes;
  const BackupKind resident_kind = is_dropped ? BackupKind::kNone : policy.backup;
  const BackupKind kind = found.stored_bytes > 0 && stored != nullptr ? stored->kind : resident_kind;
  found.with_backup[static_cast<size_t>(kind)] = 1;
  // The changes of an operation are counted when it lets go.
  found.retained_bytes +=
      is_held ? std::min<uint64_t>(counted.bytes_kept_beside_host(), found.host_bytes) : kept_beside_host_bytes();
  found.ahead_bytes = is_held ? std::min<uint64_t>(counted.ahead_bytes, found.retained_bytes) : known_bytes();
  found.paused_host_bytes = is_paused.load() ? found.host_bytes : 0;
  found.away_count = wants_resume() && !is_trimmed ? 1 : 0;
  found.kept_bytes = is_kept() ? found.resident_bytes : 0;
  found.here_count = !is_kept() && (found.device_bytes > 0 || has_stale_memory()) ? 1 : 0;
  return found;
}

// A demotion keeps the backup, for the time after the promotion.
size_t Allocation::kept_beside_host_bytes() const {
  return bytes_of_blocks(*this, Place::kHost, &StoredBlock::is_touched);
}

size_t Allocation::known_bytes() const { return bytes_of_blocks(*this, Place::kDevice, &StoredBlock::has_digest); }

size_t Allocation::bytes_in(Place place) const {
  size_t total = 0;
  for (const Chunk& chunk : chunks)
    total += chunk.place.load(std::memory_order_acquire) == place ? chunk.size_bytes : 0;
  return total;
}

size_t Allocation::resident_bytes() const {
  size_t total = 0;
  for (const Chunk& chunk : chunks) total += chunk.is_resident() ? chunk.size_bytes : 0;
  return total;
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
