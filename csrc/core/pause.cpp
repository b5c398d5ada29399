#include "core/pause.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "driver/context.h"

namespace ebbtide {
namespace {

// Adds a block to the ranges, which are in order.
void add_block(std::vector<CopyRange>& ranges, size_t offset) {
  if (!ranges.empty() && ranges.back().offset + ranges.back().size_bytes == offset) {
    ranges.back().size_bytes += kernels::kBlockBytes;
  } else {
    ranges.push_back({offset, kernels::kBlockBytes});
  }
}

}  // namespace

BackupKind PausePart::kind_of(const Allocation& allocation) const {
  return is_trim_ ? BackupKind::kNone : request_.backup.value_or(allocation.policy.backup);
}

void PausePart::prepare(const Allocations& allocations) {
  for (const auto& allocation : allocations) {
    add_row(*allocation);
    select(allocation);
  }
  claim_host_memory();
  open_backups();
  for (auto& [device, part] : parts_) borrow_engine(device, part);
}

// The backup that the allocation has, where it can take the bytes. What is partly away goes on with the one that it has: a second one for the rest is not kept, so nobody may look at it then.
std::shared_ptr<Stored> PausePart::usable_backup(const Allocation& allocation, BackupKind kind) {
  auto stored = saver().registry.stored_of(allocation);
  if (stored == nullptr) return stored;
  if (allocation.is_away() && stored->has_views()) {
    throw StateError("tag '" + allocation.tag->name +
                     "' is partly away, and somebody still looks at its backup (saver.backup_of), which this pause "
                     "would write into: resume the tag, or let go of the view first");
  }
  if (allocation.is_away()) return stored;
  return stored->kind == kind && !stored->has_views() ? stored : nullptr;
}

void PausePart::select(const std::shared_ptr<Allocation>& allocation) {
  const BackupKind kind = kind_of(*allocation);
  DevicePart& part = parts_[allocation->device];
  Kept* kept = nullptr;
  const bool is_dropping = kind == BackupKind::kNone;
  if (!is_dropping && allocation->device_bytes() > 0) {
    kept = &kept_.emplace_back();
    kept->allocation = allocation;
    kept->stored = usable_backup(*allocation, kind);
    kept->had_backup = kept->stored != nullptr;
    kept->is_unused = unused_blocks(*allocation);
  }
  for (Chunk& chunk : allocation->chunks) {
    // What lies on the host takes no device memory: it stays, unless it is to be forgotten.
    if (chunk.is_on_host() && !is_dropping) continue;
    if (chunk.is_resident() && kept != nullptr) {
      part.leaving.push_back({allocation.get(), &chunk, kept, 0, {}});
    } else if (chunk.memory.has_handle()) {
      part.dropped.emplace_back(allocation.get(), &chunk);
    }
  }
}

// Blocks that lie whole in a range of which the caller says that nobody uses it.
std::vector<bool> PausePart::unused_blocks(const Allocation& allocation) {
  std::vector<bool> is_unused(allocation.size_bytes() / kernels::kBlockBytes, false);
  if (!saver().skip.unused.load()) return is_unused;
  const CUdeviceptr begin = allocation.address();
  const CUdeviceptr end = begin + allocation.size_bytes();
  auto range = std::upper_bound(request_.unused.begin(), request_.unused.end(), begin,
                                [](CUdeviceptr at, const AddressRange& other) { return at < other.end(); });
  for (; range != request_.unused.end() && range->address < end; ++range) {
    const size_t to = std::min(range->end(), end) - begin;
    size_t offset = round_up(std::max(range->address, begin) - begin, kernels::kBlockBytes);
    for (; offset + kernels::kBlockBytes <= to; offset += kernels::kBlockBytes) {
      is_unused[offset / kernels::kBlockBytes] = true;
    }
  }
  return is_unused;
}

// Host memory that the backup of this allocation may touch and has not touched yet: none for a block that left before and whose pages were kept.
uint64_t PausePart::bytes_to_touch(const Kept& kept) const {
  const BackupKind kind = kept.stored != nullptr ? kept.stored->kind : kind_of(*kept.allocation);
  if (kind == BackupKind::kDisk) return 0;
  // What is pinned is pinned whole.
  if (kind == BackupKind::kPinned) return kept.stored == nullptr ? kept.allocation->size_bytes() : 0;
  uint64_t bytes = 0;
  for (const Chunk& chunk : kept.allocation->chunks) {
    if (!chunk.is_on_device()) continue;
    for (size_t block = chunk.first_block(); block < chunk.end_block(); ++block) {
      const bool is_touched = kept.stored != nullptr && kept.stored->blocks[block].is_touched;
      if (!is_touched && !kept.is_unused[block]) bytes += kernels::kBlockBytes;
    }
  }
  return bytes;
}

// One claim for all, so that an error names what the whole pause needs.
void PausePart::claim_host_memory() {
  uint64_t bytes = 0;
  std::string tags;
  const Tag* last = nullptr;
  for (const Kept& kept : kept_) {
    const uint64_t needed = bytes_to_touch(kept);
    if (needed > 0 && kept.allocation->tag != last)
      tags += (last == nullptr ? "'" : ", '") + kept.allocation->tag->name + "'";
    if (needed > 0) last = kept.allocation->tag;
    bytes += needed;
  }
  if (bytes == 0) return;
  HostClaim claim = saver().host_budget.claim(bytes, "the backup of " + tags);
  for (Kept& kept : kept_) kept.claim = claim.split_promised(bytes_to_touch(kept));
}

void PausePart::open_backups() {
  std::vector<std::shared_ptr<Stored>> pinned;
  for (Kept& kept : kept_) {
    if (kept.had_backup) {
      reclaim(kept);
      continue;
    }
    // Whole before settle() can see it.
    auto stored = open_backup(saver(), kind_of(*kept.allocation), *kept.allocation);
    if (stored->kind == BackupKind::kPinned) {
      stored->claim = std::move(kept.claim);
      pinned.push_back(stored);
    }
    kept.stored = std::move(stored);
  }
  if (!pinned.empty()) populate_backups(pinned, kept_.front().allocation->device);
}

// What an earlier failure gave back of a backup that goes on.
void PausePart::reclaim(const Kept& kept) {
  for (const Chunk& chunk : kept.allocation->chunks) {
    bool is_missing = false;
    for (size_t block = chunk.first_block(); block < chunk.end_block(); ++block)
      is_missing |= !kept.stored->blocks[block].is_touched;
    if (chunk.is_resident() && is_missing) kept.stored->backup->reclaim(chunk.offset, chunk.size_bytes);
  }
}

void PausePart::borrow_engine(int device, DevicePart& part) {
  if (part.leaving.empty()) return;
  uint64_t bytes = 0;
  uint64_t staged_bytes = 0;
  uint64_t fresh_bytes = 0;
  for (const Leaving& leaving : part.leaving) {
    bytes += leaving.chunk->size_bytes;
    const Stored& stored = *leaving.kept->stored;
    if (stored.backup->direct() != nullptr) continue;
    for (size_t block = leaving.chunk->first_block(); block < leaving.chunk->end_block(); ++block) {
      if (leaving.kept->is_unused[block]) continue;
      staged_bytes += kernels::kBlockBytes;
      fresh_bytes += stored.kind == BackupKind::kRam && !stored.blocks[block].is_touched ? kernels::kBlockBytes : 0;
    }
  }
  const int sharers = static_cast<int>(parts_.size()) * (exchanges_ != nullptr ? 2 : 1);
  part.engine =
      std::make_unique<EnginePool::Loan>(saver().engines.borrow(device, copy_need(staged_bytes, fresh_bytes, sharers)));
  const SkipRules& skip = saver().skip;
  if (!skip.constant.load() && !skip.clean.load()) return;
  part.scan = BlockScan::create(*part.engine, bytes / kernels::kBlockBytes, saver().digest_seed);
  if (part.scan == nullptr) return;
  for (Leaving& leaving : part.leaving) {
    leaving.first_scanned =
        part.scan->add(leaving.allocation->address() + leaving.chunk->offset, leaving.chunk->size_bytes);
  }
}

std::vector<int> PausePart::devices() const {
  std::vector<int> devices;
  for (const auto& [device, part] : parts_) devices.push_back(device);
  return devices;
}

std::map<int, uint64_t> PausePart::leaving_bytes() const {
  std::map<int, uint64_t> bytes;
  for (const auto& [device, part] : parts_) {
    for (const Leaving& leaving : part.leaving) bytes[device] += leaving.chunk->size_bytes;
    for (const auto& [allocation, chunk] : part.dropped)
      bytes[device] += chunk->memory.has_handle() && !chunk->memory.is_on_host() ? chunk->size_bytes : 0;
  }
  return bytes;
}

void PausePart::run_device(int device) {
  DevicePart& part = parts_.at(device);
  if (!part.leaving.empty()) move_out(part);
  if (exchanges_ != nullptr) drop(part);  // the other side may wait for it
}

void PausePart::move_out(DevicePart& part) {
  if (part.scan != nullptr) part.scan->launch();
  std::optional<Copy> copy;  // its threads are not started where nothing must be copied
  std::vector<Leaving*> submitted;
  for (Leaving& leaving : part.leaving) {
    decide(part, leaving);
    if (leaving.ranges.empty()) {
      leave(part, leaving);
    } else {
      if (!copy) copy.emplace(part.engine->engine(), CopyDirection::kToStore, part.engine->cut());
      submitted.push_back(&leaving);
      copy->submit({leaving.allocation->address() + leaving.chunk->offset, leaving.kept->stored->backup.get(),
                    leaving.chunk->offset, leaving.ranges,
                    saver().skip.must_compare.load() && leaving.kept->had_backup});
    }
    while (const auto job = copy ? copy->poll_landed() : std::nullopt) leave(part, *submitted[*job]);
  }
  while (const auto job = copy ? copy->finish_next() : std::nullopt) leave(part, *submitted[*job]);
}

void PausePart::decide(DevicePart& part, Leaving& leaving) {
  leaving.ranges.clear();
  for (size_t index = 0; index < leaving.chunk->block_count(); ++index) {
    const kernels::BlockReport* const report =
        part.scan == nullptr ? nullptr : &part.scan->report(leaving.first_scanned + index);
    if (must_copy(leaving, leaving.chunk->first_block() + index, report)) {
      add_block(leaving.ranges, index * kernels::kBlockBytes);
    }
  }
}

// Says what will stand for the block while it is away. Until its chunk leaves, the block on the device stands for itself.
bool PausePart::must_copy(Leaving& leaving, size_t block, const kernels::BlockReport* report) {
  const SkipRules& skip = saver().skip;
  StoredBlock& stored = leaving.kept->stored->blocks[block];
  ReportRow& entry = row(*leaving.allocation);
  if (leaving.kept->is_unused[block]) {
    stored.is_constant = true;
    stored.value = {};
    entry.unused += kernels::kBlockBytes;
    return false;
  }
  if (report != nullptr && report->is_constant != 0 && skip.constant.load()) {
    stored.is_constant = true;
    stored.value = report->value;
    entry.constant += kernels::kBlockBytes;
    return false;
  }
  stored.is_constant = false;
  const bool is_clean = report != nullptr && skip.clean.load() && stored.has_digest && stored.digest == report->digest;
  if (is_clean && !skip.must_compare.load()) {
    entry.clean += kernels::kBlockBytes;
    return false;
  }
  stored.has_digest = false;  // before its bytes in the store change
  return true;
}

// The store holds what the chunk held when its digest was taken, if it still has that digest now that all is copied.
void PausePart::note_digests(DevicePart& part, const Leaving& leaving) {
  const bool is_kept = leaving.allocation->policy.retain || leaving.kept->stored->kind == BackupKind::kPinned;
  if (part.scan == nullptr || !saver().skip.clean.load() || leaving.ranges.empty() || !is_kept) return;
  const kernels::BlockReport* const again = part.scan->look_again(leaving.first_scanned, leaving.chunk->block_count());
  for (const CopyRange& range : leaving.ranges) {
    const size_t first = range.offset / kernels::kBlockBytes;
    for (size_t index = first; index < first + range.size_bytes / kernels::kBlockBytes; ++index) {
      StoredBlock& stored = leaving.kept->stored->blocks[leaving.chunk->first_block() + index];
      stored.digest = again[index].digest;
      stored.has_digest = stored.digest == part.scan->report(leaving.first_scanned + index).digest;
    }
  }
}

void PausePart::leave(DevicePart& part, Leaving& leaving) {
  Kept& kept = *leaving.kept;
  Chunk& chunk = *leaving.chunk;
  note_digests(part, leaving);
  if (!kept.is_attached) {
    // Before the device gives the bytes up, so that they are never nowhere.
    saver().registry.set_stored(*kept.allocation, kept.stored);
    kept.is_attached = true;
  }
  chunk.mapping.unmap();
  mark_given_up();
  chunk.place.store(Place::kStored, std::memory_order_release);
  ReportRow& entry = row(*leaving.allocation);
  for (const CopyRange& range : leaving.ranges) {
    entry.copied += range.size_bytes;
    note_touched(kept, chunk.first_block() + range.offset / kernels::kBlockBytes,
                 range.size_bytes / kernels::kBlockBytes);
  }
  give_up(*leaving.allocation, chunk);
}

void PausePart::note_touched(Kept& kept, size_t first_block, size_t count) {
  uint64_t bytes = 0;
  for (size_t block = first_block; block < first_block + count; ++block) {
    StoredBlock& stored = kept.stored->blocks[block];
    bytes += stored.is_touched ? 0 : kernels::kBlockBytes;
    stored.is_touched = true;
  }
  HostClaim part = kept.claim.split_promised(bytes);
  part.touch(bytes);
  kept.stored->claim.merge(std::move(part));
}

// The physical memory behind a chunk that nobody can reach any more goes.
void PausePart::give_up(Allocation& allocation, Chunk& chunk) {
  if (chunk.memory.is_on_host()) {
    saver().host_pool.recycle(allocation.device, allocation.address() + chunk.offset, chunk);
    return;
  }
  if (exchanges_ != nullptr && chunk.memory.has_handle()) {
    chunk.mapping.unmap();
    exchanges_->at(allocation.device)->offer(chunk.memory, chunk.charge);
  } else {
    chunk.give_up_stale_memory();
  }
  row(allocation).bytes += chunk.size_bytes;
}

void PausePart::drop(DevicePart& part) {
  for (const auto& [allocation, chunk] : part.dropped) {
    const bool is_here = chunk->is_on_device() || chunk->is_on_host();
    if (is_here) {
      // On the host it may be cleared first: then it is given up from there on.
      if (!chunk->is_on_host()) chunk->mapping.unmap();
      mark_given_up();
      chunk->place.store(Place::kDropped, std::memory_order_release);
      chunk->is_detached.store(false);
    }
    give_up(*allocation, *chunk);
  }
}

void PausePart::run_last() {
  if (exchanges_ != nullptr) return;
  for (auto& [device, part] : parts_) {
    const ContextScope scope(device);
    drop(part);
  }
}

// After a failure: bytes of chunks that did not leave may have been copied already. Their pages go back, and a backup that holds nothing goes whole.
void PausePart::forget_what_stayed(const Kept& kept) noexcept {
  for (const Chunk& chunk : kept.allocation->chunks) {
    if (!chunk.is_on_device()) continue;
    for (size_t block = chunk.first_block(); block < chunk.end_block(); ++block) {
      StoredBlock& stored = kept.stored->blocks[block];
      if (stored.is_touched) continue;
      // With the pages goes what is known of them: else the next pause would take the block for clean.
      stored.has_digest = false;
      kept.stored->backup->discard(block * kernels::kBlockBytes, kernels::kBlockBytes);
    }
  }
  if (kept.is_attached && !kept.had_backup && !kept.allocation->is_any_stored())
    saver().registry.set_stored(*kept.allocation, nullptr);
}

void PausePart::settle() noexcept {
  for (auto& [device, part] : parts_) {
    // What was retained of an earlier pause is of no use once the content was dropped.
    for (const auto& [allocation, chunk] : part.dropped) {
      if (allocation->resident_bytes() == 0 && !allocation->is_any_stored())
        saver().registry.set_stored(*allocation, nullptr);
    }
  }
  parts_.clear();
  for (const Kept& kept : kept_) {
    if (kept.stored != nullptr && kept.allocation->device_bytes() > 0) forget_what_stayed(kept);
  }
  kept_.clear();
}

}  // namespace ebbtide
