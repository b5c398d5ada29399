#include "core/pause.h"

#include <algorithm>

#include "base/error.h"

namespace ebbtide {

void PausePart::prepare(const Allocations& allocations) {
  HostClaim claim = claim_host_memory(allocations);
  for (const auto& allocation : allocations) {
    const BackupKind kind = kind_of(*allocation);
    if (kind != BackupKind::kNone && allocation->resident_bytes() > 0) {
      keep(allocation, claim.split_promised(bytes_to_touch(*allocation)));
    }
    for (Chunk& chunk : allocation->chunks) {
      const bool is_dropped = chunk.is_resident() && kind == BackupKind::kNone;
      if (is_dropped || chunk.has_stale_memory()) dropped_.emplace_back(allocation.get(), &chunk);
    }
  }
  make_copiers();
}

// Host memory that the backup of this allocation has not touched yet: none for a chunk that left before and came back.
uint64_t PausePart::bytes_to_touch(const Allocation& allocation) {
  if (kind_of(allocation) == BackupKind::kNone) return 0;
  const auto stored = saver().registry.stored_of(allocation);
  uint64_t bytes = 0;
  for (const Chunk& chunk : allocation.chunks) {
    const bool is_touched = stored != nullptr && stored->is_touched[chunk.index];
    if (chunk.is_resident() && !is_touched) bytes += chunk.size_bytes;
  }
  return bytes;
}

// One claim for all, so that an error names what the whole pause needs.
HostClaim PausePart::claim_host_memory(const Allocations& allocations) {
  uint64_t bytes = 0;
  std::string tags;
  const Tag* last = nullptr;
  for (const auto& allocation : allocations) {
    const uint64_t needed = bytes_to_touch(*allocation);
    if (needed > 0 && allocation->tag != last) tags += (last == nullptr ? "'" : ", '") + allocation->tag->name + "'";
    if (needed > 0) last = allocation->tag;
    bytes += needed;
  }
  if (bytes == 0) return {};
  return saver().host_budget.claim(bytes, "the backup of " + tags);
}

void PausePart::keep(const std::shared_ptr<Allocation>& allocation, HostClaim claim) {
  Kept& kept = kept_.emplace_back();
  kept.allocation = allocation;
  kept.stored = saver().registry.stored_of(*allocation);
  kept.claim = std::move(claim);
  if (kept.stored == nullptr) {
    // Whole before settle() can see it.
    auto stored = std::make_shared<Stored>();
    stored->backup = store_of(kind_of(*allocation)).open(allocation->size_bytes());
    stored->is_touched.assign(allocation->chunks.size(), false);
    kept.stored = std::move(stored);
    kept.is_new = true;
  }
  DevicePart& part = parts_[allocation->device];
  for (Chunk& chunk : allocation->chunks) {
    if (!chunk.is_resident()) continue;
    part.leaving.push_back({allocation.get(), &chunk, &kept});
    part.jobs.push_back(
        {allocation->address() + chunk.offset, kept.stored->backup.get(), chunk.offset, chunk.size_bytes});
  }
}

void PausePart::make_copiers() {
  for (auto& [device, part] : parts_) {
    uint64_t bytes = 0;
    for (const CopyJob& job : part.jobs) bytes += job.size_bytes;
    const int threads = choose_copy_threads(bytes);
    part.ring.emplace(saver().staging.borrow(device, threads));
    part.copier =
        std::make_unique<Copier>(device, part.ring->staging(), std::min(threads, part.ring->staging().slot_count()));
  }
}

void PausePart::run() {
  for (auto& [device, part] : parts_) {
    part.copier->run(CopyDirection::kToStore, part.jobs, [&part, this](size_t job) { leave(part.leaving[job]); });
  }
  drop_rest();
}

void PausePart::leave(const Leaving& leaving) {
  Kept& kept = *leaving.kept;
  const uint64_t bytes = leaving.chunk->size_bytes;
  ReportRow& entry = row(*leaving.allocation);
  if (kept.is_new) {
    // Before the device gives the bytes up, so that they are never nowhere.
    saver().registry.set_stored(*leaving.allocation, kept.stored);
    kept.is_new = false;
  }
  leaving.chunk->mapping.unmap();
  mark_given_up();
  leaving.chunk->place.store(Place::kStored, std::memory_order_release);
  if (!kept.stored->is_touched[leaving.chunk->index]) {
    HostClaim part = kept.claim.split_promised(bytes);
    part.touch(bytes);
    kept.stored->claim.merge(std::move(part));
    kept.stored->is_touched[leaving.chunk->index] = true;
  }
  entry.copied += bytes;
  leaving.chunk->give_up_stale_memory();
  entry.bytes += bytes;
}

void PausePart::drop_rest() {
  for (const auto& [allocation, chunk] : dropped_) {
    ReportRow& entry = row(*allocation);
    if (chunk->is_resident()) {
      chunk->mapping.unmap();
      mark_given_up();
      chunk->place.store(Place::kDropped, std::memory_order_release);
    }
    chunk->give_up_stale_memory();
    entry.bytes += chunk->size_bytes;
  }
}

// After a failure: bytes of chunks that did not leave may have been copied already. Their pages go back, and a backup that holds nothing goes whole.
void PausePart::forget_what_stayed(const Kept& kept) noexcept {
  bool is_any_stored = false;
  for (const Chunk& chunk : kept.allocation->chunks) {
    is_any_stored |= chunk.place.load() == Place::kStored;
    if (chunk.is_resident() && !kept.stored->is_touched[chunk.index]) {
      kept.stored->backup->discard(chunk.offset, chunk.size_bytes);
    }
  }
  if (!kept.is_new && !is_any_stored) saver().registry.set_stored(*kept.allocation, nullptr);
}

void PausePart::settle() noexcept {
  parts_.clear();
  for (const Kept& kept : kept_) {
    if (kept.stored != nullptr && kept.allocation->resident_bytes() > 0) forget_what_stayed(kept);
  }
  kept_.clear();
  dropped_.clear();
}

}  // namespace ebbtide
