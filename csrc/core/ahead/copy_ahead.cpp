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

  // The memory that a pause of the tag would read now, by device. Only for the first step.
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
    : Move(core, request, OperationKind::kPrepare), window_(std::make_shared<Window>()) {}

// Only as many allocations as the step looks at: a free of any other one need not wait for its end.
TagClaim CopyAhead::claim() const {
  return {.tags = request().tags,
          .concerns =
              [window = window_, begin = request().ahead->next_sequence,
               is_first_step = is_first_step()](const Allocation& allocation) {
                if (allocation.sequence < begin || (window->is_full && !is_first_step)) return false;
                if (allocation.policy.backup == BackupKind::kNone || allocation.is_away()) return false;
                if (allocation.is_kept() || allocation.is_paused.load() || allocation.device_bytes() == 0) return false;
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
          .is_ahead_step = true};
}

bool CopyAhead::is_first_step() const {
  return request().ahead->next_sequence == 0 && request().ahead->next_offset == 0;
}

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
  reached_ = *request().ahead;
  remaining_bytes_ = reached_.step_bytes;
  if (!is_of_use(allocations)) return;
  for (const auto& allocation : allocations) add_row(*allocation);
  for (const auto& allocation : allocations) {
    if (!add(allocation)) break;
  }
  if (parts_.empty()) return;
  std::vector<BackupUse*> uses;
  for (BackupUse& use : uses_) uses.push_back(&use);
  charge_backups(core(), uses, "the copy ahead of a pause of ", true);
  borrow_engine();
}

// False where the step ends before it, or in it. Skipped: a backup with a view, whose holder sees it unchanged or
// writes into it, and one of another kind than the next pause makes.
bool CopyAhead::add(const std::shared_ptr<Allocation>& allocation) {
  if (fresh_bytes_ >= remaining_bytes_) {
    window_->is_full = true;
    return false;
  }
  const auto& stored = allocation->stored;
  const BackupKind kind = allocation->policy.backup;
  const bool is_usable = stored == nullptr || (!stored->is_looked_at() && stored->kind == kind);
  if (is_usable) {
    BackupUse& use = uses_.emplace_back(BackupUse{allocation, unused_blocks(core(), request(), *allocation), stored});
    use.had_backup = use.is_attached = stored != nullptr;
    if (!use.had_backup) {
      open_backup(core(), kind, use);
      use.stored->is_spare = true;
    }
    for (const Chunk& chunk : allocation->chunks) {
      if (!chunk.is_resident() || !chunk.is_on_device()) continue;
      if (!add_blocks(use, chunk)) return false;
    }
  }
  reached_.next_sequence = allocation->sequence + 1;
  reached_.next_offset = 0;
  return true;
}

// False where the step ends in the chunk.
bool CopyAhead::add_blocks(BackupUse& use, const Chunk& chunk) {
  const uint64_t sequence = use.allocation->sequence;
  const size_t begin =
      sequence == request().ahead->next_sequence ? request().ahead->next_offset / kernels::kBlockBytes : 0;
  const size_t first = std::max(chunk.first_block(), begin);
  if (first >= chunk.end_block()) return true;
  size_t end = first;
  while (end < chunk.end_block() && fresh_bytes_ < remaining_bytes_ &&
         (scanned_blocks_ + end - first) * kernels::kBlockBytes < kMostLookedAtBytes) {
    const bool is_fresh = !use.stored->blocks[end].has_digest && !use.is_unused[end];
    fresh_bytes_ += is_fresh ? kernels::kBlockBytes : 0;
    ++end;
  }
  if (end > first) {
    use.add_need(first, end);
    Part& part = parts_.emplace_back(Part{&use, &chunk, first, end - first, scanned_blocks_});
    part.digests.resize(chunk.block_count());
    scanned_blocks_ += part.block_count;
  }
  if (end == chunk.end_block()) return true;
  window_->is_full = true;
  reached_.next_sequence = sequence;
  reached_.next_offset = end * kernels::kBlockBytes;
  return false;
}

void CopyAhead::borrow_engine() {
  const int device = uses_.front().allocation->device;
  add_device(device);
  const auto has_kind = [&](BackupKind kind) {
    return std::any_of(uses_.begin(), uses_.end(), [&](const BackupUse& use) { return use.stored->kind == kind; });
  };
  const uint64_t staged_bytes = has_kind(BackupKind::kRam) || has_kind(BackupKind::kDisk) ? remaining_bytes_ : 0;
  policy::CopyNeed need = copy_need(staged_bytes, has_kind(BackupKind::kRam) ? staged_bytes : 0);
  need.has_files = has_kind(BackupKind::kDisk);
  if (reached_.threads > 0) need.wanted_threads = std::clamp(usable_cores() / kCoresPerThread, 1, reached_.threads);
  // The first step takes the engine that the pause will want, so that the pause need not pin it.
  const auto whole = window_->whole.find(device);
  const uint64_t all_blocks = whole == window_->whole.end() ? 0 : whole->second.looked_at_bytes / kernels::kBlockBytes;
  const EngineExtras extras{.table_bytes = BlockScan::table_bytes(std::max(scanned_blocks_, all_blocks)),
                            .later_ring_bytes = ring_of_pause(device)};
  engine_ = std::make_unique<EnginePool::Loan>(core().engines.borrow(device, need, extras));
  scan_ = BlockScan::create(*engine_, scanned_blocks_, core().digest_seed, all_blocks);
  if (scan_ == nullptr) return;
  for (const Part& part : parts_) {
    scan_->add(part.use->allocation->address() + part.first_block * kernels::kBlockBytes,
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

void CopyAhead::run_device(int /*device*/) {
  if (scan_ != nullptr) scan_->launch();
  CopyRun<Part> run(engine_.get(), CopyDirection::kToStore, [&](Part& part) { land(part); });
  for (Part& part : parts_) {
    const bool may_go_on = choose(part);
    if (!part.ranges.empty()) {
      reclaim_backup(*part.use, *part.chunk, part.ranges);
      run.submit(part, {.device_address = part.use->allocation->address() + part.chunk->offset,
                        .backup = part.use->stored->backup.get(),
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
  ReportRow& entry = row(*part.use->allocation);
  for (size_t index = 0; index < part.block_count; ++index) {
    const size_t block = part.first_block + index;
    StoredBlock& stored = part.use->stored->blocks[block];
    const kernels::BlockReport* const report = scan_ == nullptr ? nullptr : &scan_->report(part.first_scanned + index);
    if (part.use->is_unused[block]) {
      entry.unused += kernels::kBlockBytes;
    } else if (report != nullptr && report->is_constant != 0 && skip.constant.load()) {
      entry.constant += kernels::kBlockBytes;
    } else if (report != nullptr && stored.has_digest && stored.digest == report->digest) {
      entry.clean += kernels::kBlockBytes;
      entry.bytes += kernels::kBlockBytes;
    } else if (remaining_bytes_ == 0) {
      reached_.next_sequence = part.use->allocation->sequence;
      reached_.next_offset = block * kernels::kBlockBytes;
      window_->is_full = true;
      return false;
    } else {
      remaining_bytes_ = saturating_subtract(remaining_bytes_, kernels::kBlockBytes);
      stored.has_digest = stored.has_content = false;  // before its bytes in the store change
      add_block(part.ranges, (block - part.chunk->first_block()) * kernels::kBlockBytes);
    }
  }
  return true;
}

void CopyAhead::land(Part& part) {
  BackupUse& use = *part.use;
  part.has_landed = true;
  attach_backup(core(), use);
  for (const CopyRange& range : part.ranges) {
    const size_t first = range.offset / kernels::kBlockBytes;
    const size_t count = range.size_bytes / kernels::kBlockBytes;
    for (size_t index = first; index < first + count; ++index) {
      StoredBlock& stored = use.stored->blocks[part.chunk->first_block() + index];
      stored.digest = part.digests[index];
      stored.has_digest = true;
    }
    touch_blocks(*use.stored, use.charge, part.chunk->first_block() + first, count);
    row(*use.allocation).copied += range.size_bytes;
    row(*use.allocation).bytes += range.size_bytes;
  }
}

void CopyAhead::run_last() {
  // A pinned backup has taken its memory, whether anything was copied or not.
  for (BackupUse& use : uses_) {
    if (use.stored->kind == BackupKind::kPinned) attach_backup(core(), use);
  }
  reached_.is_over |= !window_->is_full;
  *request().ahead = reached_;
}

void CopyAhead::settle() noexcept {
  scan_.reset();
  engine_.reset();
  for (const Part& part : parts_) {
    if (!part.has_landed && !part.ranges.empty() && part.use->is_attached) discard_untouched(*part.use);
  }
  parts_.clear();
  uses_.clear();
}

void CopyAhead::count(Counters& counters, const ReportRow& total) const { counters.bytes_to_host += total.copied; }

}  // namespace ebbtide
