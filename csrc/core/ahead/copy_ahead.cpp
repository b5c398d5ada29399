#include "core/ahead/copy_ahead.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/transfer/copy_run.h"
#include "driver/device_kernels.h"

namespace ebbtide {
namespace {

// At most this much is compared in one step; at the rate of device memory a quarter of a millisecond.
constexpr uint64_t kMostLookedAtBytes = kGiB;

// Of the cores, one thread at most for each so many copies beside the program.
constexpr int kCoresPerThread = 4;

}  // namespace

// Filled by the claim, under the registry's lock.
struct CopyAhead::Window {
  uint64_t looked_at_bytes = 0;
  int device = -1;
  bool is_full = false;  // there are more than the step looks at

  // What a pause of the tag would look at now, by device. Only for the first step.
  struct Whole {
    uint64_t looked_at_bytes = 0;
    uint64_t staged_bytes = 0;
    bool has_files = false;
  };
  std::map<int, Whole> whole;
  void add_to_whole(const Allocation& allocation);
};

void CopyAhead::Window::add_to_whole(const Allocation& allocation) {
  Whole& of_device = whole[allocation.device];
  const uint64_t bytes = allocation.device_bytes();
  of_device.looked_at_bytes += bytes;
  of_device.staged_bytes += allocation.policy.backup == BackupKind::kPinned ? 0 : bytes;
  of_device.has_files |= allocation.policy.backup == BackupKind::kDisk;
}

CopyAhead::CopyAhead(Core& core, const OperationRequest& request)
    : Move(core), request_(request), window_(std::make_shared<Window>()) {}

// Only as many allocations as the step looks at: a free of any other one need not wait for its end.
TagClaim CopyAhead::claim() const {
  return {.tags = request_.tags,
          .concerns =
              [window = window_, begin = request_.ahead->next_sequence,
               is_first_step = is_first_step()](const Allocation& allocation) {
                if (allocation.sequence < begin || (window->is_full && !is_first_step)) return false;
                if (allocation.policy.backup == BackupKind::kNone || allocation.is_away()) return false;
                if (allocation.is_paused.load() || allocation.device_bytes() == 0) return false;
                if (is_first_step) window->add_to_whole(allocation);
                if (window->is_full) return false;
                const bool is_first = window->device < 0;
                window->is_full = !is_first && (window->device != allocation.device ||
                                                window->looked_at_bytes + allocation.size_bytes() > kMostLookedAtBytes);
                if (window->is_full) return false;
                window->device = allocation.device;
                window->looked_at_bytes += allocation.size_bytes();
                return true;
              },
          .moves_memory = false,
          .is_step = true};
}

bool CopyAhead::is_first_step() const { return request_.ahead->next_sequence == 0 && request_.ahead->next_offset == 0; }

// False where nothing that is copied now would spare a pause anything: then this says why, and where to go on.
bool CopyAhead::is_of_use(const Allocations& allocations) {
  if (!core().rules.skip.clean.load()) {
    note_ = "nothing was copied ahead, since a pause would not compare it (skip_clean is off)";
    reached_.is_over = true;
    return false;
  }
  if (allocations.empty() || DeviceKernels::of(allocations.front()->device) != nullptr) return true;
  note_ = "nothing was copied ahead from device " + std::to_string(allocations.front()->device) +
          ", since a pause would not compare it (the device has no kernels)";
  reached_.next_sequence = allocations.back()->sequence + 1;
  reached_.next_offset = 0;
  return false;
}

void CopyAhead::prepare(const Allocations& allocations) {
  reached_ = *request_.ahead;
  left_bytes_ = reached_.step_bytes;
  if (!is_of_use(allocations)) return;
  for (const auto& allocation : allocations) add_row(*allocation);
  for (const auto& allocation : allocations) {
    if (!add(allocation)) break;
  }
  if (parts_.empty()) return;
  charge_host_memory();
  borrow_engine();
}

// False where the step ends before it, or in it. Left out: a backup that somebody looks at, who sees it stay as it is
// or writes into it, and one of another kind than the next pause makes.
bool CopyAhead::add(const std::shared_ptr<Allocation>& allocation) {
  if (fresh_bytes_ >= left_bytes_) {
    window_->is_full = true;
    return false;
  }
  auto stored = core().registry.backup_of(*allocation);
  const BackupKind kind = allocation->policy.backup;
  const bool is_usable = stored == nullptr || (!stored->is_looked_at() && stored->kind == kind);
  if (is_usable) {
    Copied& copied = copied_.emplace_back();
    copied.allocation = allocation;
    copied.is_unused = unused_blocks(core(), request_, *allocation);
    copied.was_there = stored != nullptr;
    if (stored == nullptr) {
      stored = open_backup(core(), kind, *allocation);
      stored->is_spare = true;
    }
    copied.stored = std::move(stored);
    for (const Chunk& chunk : allocation->chunks) {
      if (!chunk.is_resident() || !chunk.is_on_device()) continue;
      if (!add_blocks(copied, chunk)) return false;
    }
  }
  reached_.next_sequence = allocation->sequence + 1;
  reached_.next_offset = 0;
  return true;
}

// False where the step ends in the chunk.
bool CopyAhead::add_blocks(Copied& copied, const Chunk& chunk) {
  const uint64_t sequence = copied.allocation->sequence;
  const size_t begin =
      sequence == request_.ahead->next_sequence ? request_.ahead->next_offset / kernels::kBlockBytes : 0;
  const size_t first = std::max(chunk.first_block(), begin);
  if (first >= chunk.end_block()) return true;
  size_t end = first;
  while (end < chunk.end_block() && fresh_bytes_ < left_bytes_ &&
         (scanned_blocks_ + end - first) * kernels::kBlockBytes < kMostLookedAtBytes) {
    const bool is_fresh = !copied.stored->blocks[end].has_digest && !copied.is_unused[end];
    fresh_bytes_ += is_fresh ? kernels::kBlockBytes : 0;
    ++end;
  }
  if (end > first) {
    Part& part = parts_.emplace_back(Part{&copied, &chunk, first, end - first, scanned_blocks_});
    part.digests.resize(chunk.block_count());
    scanned_blocks_ += part.block_count;
  }
  if (end == chunk.end_block()) return true;
  window_->is_full = true;
  reached_.next_sequence = sequence;
  reached_.next_offset = end * kernels::kBlockBytes;
  return false;
}

void CopyAhead::charge_host_memory() {
  std::vector<std::shared_ptr<BackupRecord>> pinned;
  uint64_t whole_bytes = 0;
  for (const Copied& copied : copied_) {
    if (copied.was_there || copied.stored->kind != BackupKind::kPinned) continue;
    pinned.push_back(copied.stored);
    whole_bytes += copied.stored->size_bytes();
  }
  std::map<Copied*, uint64_t> fresh_bytes;
  uint64_t bytes = 0;
  for (const Part& part : parts_) {
    if (part.copied->stored->kind != BackupKind::kRam) continue;
    for (size_t block = part.first_block; block < part.first_block + part.block_count; ++block) {
      const bool is_needed = !part.copied->stored->blocks[block].is_touched && !part.copied->is_unused[block];
      const uint64_t needed = is_needed ? kernels::kBlockBytes : 0;
      fresh_bytes[part.copied] += needed;
      bytes += needed;
    }
  }
  if (bytes + whole_bytes > 0) {
    const Tag& tag = *copied_.front().allocation->tag;
    HostCharge charge = core().budgets.host.charge_spare(
        bytes + whole_bytes, "what is copied ahead of a pause of '" + tag.name + "'", &BackupHolders(core()).of(tag));
    for (const auto& stored : pinned) stored->charge = charge.split_promised(stored->size_bytes());
    for (auto& [copied, needed] : fresh_bytes) copied->charge = charge.split_promised(needed);
  }
  if (!pinned.empty()) populate_backups(pinned, copied_.front().allocation->device);
}

void CopyAhead::borrow_engine() {
  const int device = copied_.front().allocation->device;
  const auto has_kind = [&](BackupKind kind) {
    return std::any_of(copied_.begin(), copied_.end(), [&](const Copied& each) { return each.stored->kind == kind; });
  };
  const uint64_t staged_bytes = has_kind(BackupKind::kRam) || has_kind(BackupKind::kDisk) ? left_bytes_ : 0;
  policy::CopyNeed need = copy_need(staged_bytes, has_kind(BackupKind::kRam) ? staged_bytes : 0);
  need.has_files = has_kind(BackupKind::kDisk);
  if (reached_.threads > 0) need.wanted_threads = std::clamp(usable_cores() / kCoresPerThread, 1, reached_.threads);
  // The first step takes what the pause will want, so that the pause need not pin it.
  const auto whole = window_->whole.find(device);
  const uint64_t all_blocks = whole == window_->whole.end() ? 0 : whole->second.looked_at_bytes / kernels::kBlockBytes;
  const EngineExtras extras{.table_bytes = BlockScan::table_bytes(std::max(scanned_blocks_, all_blocks)),
                            .later_ring_bytes = ring_of_pause(device)};
  engine_ = std::make_unique<EnginePool::Loan>(core().engines.borrow(device, need, extras));
  scan_ = BlockScan::create(*engine_, scanned_blocks_, core().digest_seed, all_blocks);
  if (scan_ == nullptr) return;
  for (const Part& part : parts_) {
    scan_->add(part.copied->allocation->address() + part.first_block * kernels::kBlockBytes,
               part.block_count * kernels::kBlockBytes);
  }
}

// The size of the ring that a pause of all that there is would borrow; 0 after the first step.
uint64_t CopyAhead::ring_of_pause(int device) const {
  const auto whole = window_->whole.find(device);
  if (whole == window_->whole.end()) return 0;
  policy::CopyNeed need = copy_need(whole->second.staged_bytes, 0);
  need.has_files = whole->second.has_files;
  need.devices = static_cast<int>(window_->whole.size());
  return policy::wanted_ring_bytes(need);
}

std::vector<int> CopyAhead::devices() const {
  return engine_ != nullptr ? std::vector<int>{copied_.front().allocation->device} : std::vector<int>{};
}

void CopyAhead::run_device(int /*device*/) {
  if (scan_ != nullptr) scan_->launch();
  CopyRun<Part> run(engine_.get(), CopyDirection::kToStore, [&](Part& part) { land(part); });
  for (Part& part : parts_) {
    const bool may_go_on = choose(part);
    if (!part.ranges.empty()) {
      reclaim(part);
      run.submit(part, {.device_address = part.copied->allocation->address() + part.chunk->offset,
                        .backup = part.copied->stored->backup.get(),
                        .offset = part.chunk->offset,
                        .ranges = part.ranges,
                        .digests = part.digests.data(),
                        .seed = core().digest_seed});
    }
    if (!may_go_on) break;
  }
  run.finish();
}

// Which of its blocks to copy. False where the step has copied as much as it may: the next one goes on there.
bool CopyAhead::choose(Part& part) {
  const SkipRules& skip = core().rules.skip;
  ReportRow& entry = row(*part.copied->allocation);
  for (size_t index = 0; index < part.block_count; ++index) {
    const size_t block = part.first_block + index;
    StoredBlock& stored = part.copied->stored->blocks[block];
    const kernels::BlockReport* const report = scan_ == nullptr ? nullptr : &scan_->report(part.first_scanned + index);
    if (part.copied->is_unused[block]) {
      entry.unused += kernels::kBlockBytes;
    } else if (report != nullptr && report->is_constant != 0 && skip.constant.load()) {
      entry.constant += kernels::kBlockBytes;
    } else if (report != nullptr && stored.has_digest && stored.digest == report->digest) {
      entry.clean += kernels::kBlockBytes;
      entry.bytes += kernels::kBlockBytes;
    } else if (left_bytes_ == 0) {
      reached_.next_sequence = part.copied->allocation->sequence;
      reached_.next_offset = block * kernels::kBlockBytes;
      window_->is_full = true;
      return false;
    } else {
      left_bytes_ = saturating_subtract(left_bytes_, kernels::kBlockBytes);
      stored.has_digest = stored.has_content = false;  // before its bytes in the store change
      add_block(part.ranges, (block - part.chunk->first_block()) * kernels::kBlockBytes);
    }
  }
  return true;
}

// Pages that an earlier failure gave back.
void CopyAhead::reclaim(const Part& part) {
  const BackupRecord& stored = *part.copied->stored;
  for (const CopyRange& range : part.ranges) {
    const size_t offset = part.chunk->offset + range.offset;
    const auto first = stored.blocks.begin() + static_cast<ptrdiff_t>(offset / kernels::kBlockBytes);
    const auto end = first + static_cast<ptrdiff_t>(range.size_bytes / kernels::kBlockBytes);
    const bool is_missing = std::any_of(first, end, [](const StoredBlock& block) { return !block.is_touched; });
    if (part.copied->was_there && is_missing) stored.backup->reclaim(offset, range.size_bytes);
  }
}

void CopyAhead::land(Part& part) {
  Copied& copied = *part.copied;
  part.has_landed = copied.has_landed_any = true;
  for (const CopyRange& range : part.ranges) {
    const size_t first = range.offset / kernels::kBlockBytes;
    const size_t count = range.size_bytes / kernels::kBlockBytes;
    for (size_t index = first; index < first + count; ++index) {
      StoredBlock& stored = copied.stored->blocks[part.chunk->first_block() + index];
      stored.digest = part.digests[index];
      stored.has_digest = true;
    }
    touch_blocks(*copied.stored, copied.charge, part.chunk->first_block() + first, count);
    row(*copied.allocation).copied += range.size_bytes;
    row(*copied.allocation).bytes += range.size_bytes;
  }
}

void CopyAhead::run_last() {
  // A pinned backup has taken its memory, whether anything was copied or not.
  for (Copied& copied : copied_) copied.has_landed_any |= copied.stored->kind == BackupKind::kPinned;
  reached_.is_over |= !window_->is_full;
  *request_.ahead = reached_;
}

// After a failure: pages of what did not land go back.
void CopyAhead::settle() noexcept {
  scan_.reset();
  engine_.reset();
  for (const Part& part : parts_) {
    const bool is_lost = !part.copied->was_there && !part.copied->has_landed_any;
    if (part.has_landed || is_lost) continue;
    for (const CopyRange& range : part.ranges) {
      const size_t first = part.chunk->first_block() + range.offset / kernels::kBlockBytes;
      for (size_t block = first; block < first + range.size_bytes / kernels::kBlockBytes; ++block) {
        if (!part.copied->stored->blocks[block].is_touched)
          part.copied->stored->backup->discard(block * kernels::kBlockBytes, kernels::kBlockBytes);
      }
    }
  }
  parts_.clear();
  for (Copied& copied : copied_) {
    if (!copied.was_there && copied.has_landed_any) core().registry.set_backup(*copied.allocation, copied.stored);
  }
  copied_.clear();
}

void CopyAhead::count(Counters& counters, const ReportRow& total) const { counters.bytes_to_host += total.copied; }

}  // namespace ebbtide
