#include "core/pause/pause.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "driver/context.h"

namespace ebbtide {

BackupKind Pause::kind_of(const Allocation& allocation) const {
  if (is_trim_) return BackupKind::kNone;
  const auto found = request_.backup_by_tag.find(allocation.tag->name);
  if (found != request_.backup_by_tag.end()) return found->second;
  return request_.backup.value_or(allocation.policy.backup);
}

TagClaim Pause::claim() const {
  if (is_trim_) {
    // Of named allocations, what is away loses no memory.
    const bool is_named = !request_.tags.addresses.empty();
    return {.tags = request_.tags,
            .concerns = [](const Allocation& allocation) { return allocation.wants_trim(); },
            .leases = is_named ? TagClaim::Leases::kRefusedWhereMemoryIs : TagClaim::Leases::kRefused,
            .marks_trimmed = true};
  }
  return {.tags = request_.tags,
          .concerns = [](const Allocation& allocation) { return allocation.wants_pause(); },
          .leases = TagClaim::Leases::kRefused,
          .finishes_tags = request_.tags.addresses.empty(),
          .counts_as_pause = true};
}

// Of an allocation that is paused or away already, a pause takes only memory that a failure left behind. What a failure
// left unmapped has yet to be paused. A trim drops backups, too.
bool Pause::moves_content(const Allocation& allocation) const {
  if (is_trim_) return true;
  const Amounts amounts = allocation.amounts();
  return !allocation.is_paused.load() && amounts.resident_bytes + amounts.detached_bytes > 0;
}

void Pause::count(Counters& counters, const ReportRow& total) const {
  if (is_trim_) return;
  ++counters.pauses;
  counters.bytes_paused += total.bytes;
  counters.bytes_to_host += total.copied;
  counters.bytes_clean += total.clean;
  counters.bytes_unused += total.unused;
  counters.bytes_constant += total.constant;
}

void Pause::prepare(const Allocations& allocations) {
  chosen_ = allocations;
  // Noted ahead, while that may still fail. settle() forgets those that did not move.
  if (request_.moved != nullptr) {
    noted_.reserve(chosen_.size());
    for (const auto& allocation : chosen_) {
      if (allocation->is_paused.load() || allocation->resident_bytes() == 0) continue;
      if (request_.moved->note(*allocation, allocation->tag->name))
        noted_.push_back({allocation, allocation->resident_bytes()});
    }
  }
  for (const auto& allocation : chosen_) {
    add_row(*allocation);
    select(allocation);
  }
  if (!request_.tags.addresses.empty()) leave_what_others_share();
  charge_host_memory();
  open_backups();
  pin_kept_backups();
  for (auto& [device, work] : work_) borrow_engine(device, work);
}

// The backup that the allocation has, where it can take the bytes. What is partly away goes on with the one that it
// has: a second one for the rest is not kept, so nobody may look at it then.
std::shared_ptr<BackupRecord> Pause::usable_backup(const Allocation& allocation, BackupKind kind) {
  auto stored = core().registry.backup_of(allocation);
  if (stored == nullptr) return stored;
  if (allocation.is_away() && stored->has_views()) {
    throw StateError("tag '" + allocation.tag->name +
                         "' is partly away, and somebody still looks at its backup, which this pause would write "
                         "into: resume the tag, or let go of the view first",
                     Cause::kBackupView);
  }
  if (allocation.is_away()) return stored;
  return stored->kind == kind && !stored->has_views() ? stored : nullptr;
}

void Pause::select(const std::shared_ptr<Allocation>& allocation) {
  const BackupKind kind = kind_of(*allocation);
  DeviceWork& work = work_[allocation->device];
  const auto departure_of = [&](std::vector<Departure>& departures, const Chunk& chunk) -> size_t {
    const auto [found, is_new] = departure_of_.try_emplace(chunk.backing.get(), departures.size());
    if (is_new) departures.emplace_back(Departure{.backing = chunk.backing.get()});
    return found->second;
  };
  Kept* kept = nullptr;
  const bool is_dropping = kind == BackupKind::kNone;
  std::vector<bool> is_unused = unused_blocks(core(), request_, *allocation);
  const bool is_wholly_unused = is_trim_ || std::find(is_unused.begin(), is_unused.end(), false) == is_unused.end();
  const Judged& judged =
      judged_.emplace_back(Judged{allocation, is_trim_ ? nullptr : begin_verdicts(*allocation), is_wholly_unused});
  for (Chunk& chunk : allocation->chunks) {
    if (chunk.is_detached.load() && chunk.is_on_device() && !is_dropping) attach(*allocation, chunk);
  }
  if (!is_dropping && allocation->device_bytes() > 0) {
    kept = &kept_.emplace_back();
    kept->allocation = allocation;
    kept->stored = usable_backup(*allocation, kind);
    kept->had_backup = kept->stored != nullptr;
    kept->earlier = core().registry.verdicts_of(*allocation);
    kept->verdicts = judged.verdicts;
  }
  if (kept != nullptr) kept->is_unused = std::move(is_unused);
  for (Chunk& chunk : allocation->chunks) {
    // What lies on the host takes no device memory: it stays, unless it is to be forgotten; and where a pause left it,
    // no later one forgets it.
    if (chunk.is_on_host() && (!is_dropping || (allocation->is_paused.load() && !is_trim_))) {
      judge_whole(judged, chunk, Verdict::kLeft);
      continue;
    }
    if (chunk.is_resident() && kept != nullptr) {
      const size_t index = departure_of(work.departures, chunk);
      Departure& departure = work.departures[index];
      departure.leaving.push_back(work.leaving.size());
      departure.chunks.emplace_back(allocation.get(), &chunk);
      ++departure.missing;
      work.leaving.push_back({allocation.get(), &chunk, kept, index, 0, {}});
    } else if (chunk.backing->has_memory()) {
      if (chunk.is_resident()) judge_whole(judged, chunk, Verdict::kDropped);
      work.dropped[departure_of(work.dropped, chunk)].chunks.emplace_back(allocation.get(), &chunk);
    }
  }
}

// Memory that could not be mapped again still holds the bytes: only from behind its address they can leave.
void Pause::attach(const Allocation& allocation, Chunk& chunk) {
  const int device = allocation.device;
  const ContextScope scope(device);
  chunk.backing->mapping =
      core().peers.map(allocation.address() + chunk.offset, chunk.backing->memory, device, core().peers.of(device));
  chunk.is_detached.store(false, std::memory_order_release);
}

// Host memory that the backup of this allocation may touch and has not touched yet: none for a block that left before
// and whose pages were kept.
uint64_t Pause::bytes_to_touch(const Kept& kept) const {
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

// One charge for all, so that an error names what the whole pause needs.
void Pause::charge_host_memory() {
  uint64_t bytes = 0;
  std::string tags;
  const Tag* last = nullptr;
  BackupHolders holders(core());
  for (const Kept& kept : kept_) {
    const uint64_t needed = bytes_to_touch(kept);
    if (needed > 0 && kept.allocation->tag != last)
      tags += (last == nullptr ? "'" : ", '") + kept.allocation->tag->name + "'";
    if (needed > 0) last = kept.allocation->tag;
    bytes += needed;
  }
  if (bytes == 0) return;
  HostBudget& budget = core().budgets.host;
  HostCharge charge = budget.charge(bytes, "the backup of " + tags, &budget.holder("backups"));
  for (Kept& kept : kept_) {
    kept.charge = charge.split_promised(bytes_to_touch(kept));
    kept.charge.hold_for(holders.of(*kept.allocation->tag));
  }
}

void Pause::open_backups() {
  std::vector<std::shared_ptr<BackupRecord>> pinned;
  for (Kept& kept : kept_) {
    if (kept.had_backup) {
      reclaim(kept);
      continue;
    }
    // Whole before settle() can see it.
    auto stored = open_backup(core(), kind_of(*kept.allocation), *kept.allocation);
    if (stored->kind == BackupKind::kPinned) {
      stored->charge = std::move(kept.charge);
      pinned.push_back(stored);
    }
    kept.stored = std::move(stored);
  }
  if (!pinned.empty()) populate_backups(pinned, kept_.front().allocation->device);
}

// A tag that goes and comes again and again need not pay for threads and a ring each time.
void Pause::pin_kept_backups() {
  uint64_t bytes = 0;
  for (const Kept& kept : kept_) bytes += kept.stored->size_bytes();
  KeptPinning pinning(core(), bytes);
  for (const Kept& kept : kept_) {
    BackupRecord& stored = *kept.stored;
    const bool is_repeated = kept.had_backup && kept.earlier != nullptr && !kept.allocation->is_away();
    if (!is_repeated || !kept.allocation->policy.retain || stored.kind != BackupKind::kRam) continue;
    pinning.try_pin(stored, *kept.allocation->tag);
  }
}

// What an earlier failure gave back of a backup that goes on.
void Pause::reclaim(const Kept& kept) {
  for (const Chunk& chunk : kept.allocation->chunks) {
    bool is_missing = false;
    for (size_t block = chunk.first_block(); block < chunk.end_block(); ++block)
      is_missing |= !kept.stored->blocks[block].is_touched;
    if (chunk.is_resident() && is_missing) kept.stored->backup->reclaim(chunk.offset, chunk.size_bytes);
  }
}

void Pause::borrow_engine(int device, DeviceWork& work) {
  if (work.leaving.empty()) return;
  uint64_t bytes = 0;
  uint64_t staged_bytes = 0;
  uint64_t fresh_bytes = 0;
  bool has_files = false;
  for (const Leaving& leaving : work.leaving) {
    bytes += leaving.chunk->size_bytes;
    const BackupRecord& stored = *leaving.kept->stored;
    if (stored.backup->direct() != nullptr) continue;
    has_files |= stored.kind == BackupKind::kDisk;
    for (size_t block = leaving.chunk->first_block(); block < leaving.chunk->end_block(); ++block) {
      if (leaving.kept->is_unused[block]) continue;
      staged_bytes += kernels::kBlockBytes;
      fresh_bytes += stored.kind == BackupKind::kRam && !stored.blocks[block].is_touched ? kernels::kBlockBytes : 0;
    }
  }
  policy::CopyNeed need = copy_need(staged_bytes, fresh_bytes);
  need.has_files = has_files;
  need.devices = static_cast<int>(work_.size());
  need.is_swap = hands_over_memory();
  const SkipRules& skip = core().rules.skip;
  const size_t scanned_blocks = skip.constant.load() || skip.clean.load() ? bytes / kernels::kBlockBytes : 0;
  work.engine = std::make_unique<EnginePool::Loan>(
      core().engines.borrow(device, need, {.table_bytes = BlockScan::table_bytes(scanned_blocks)}));
  work.scan = BlockScan::create(*work.engine, scanned_blocks, core().digest_seed);
  if (work.scan == nullptr) return note_blindness(device, scanned_blocks);
  for (Leaving& leaving : work.leaving) {
    leaving.first_scanned =
        work.scan->add(leaving.allocation->address() + leaving.chunk->offset, leaving.chunk->size_bytes);
  }
}

void Pause::note_blindness(int device, size_t scanned_blocks) {
  if (scanned_blocks == 0 || DeviceKernels::of(device) == nullptr) return;  // not wanted; logged
  note_ += (note_.empty() ? "" : "; ") + ("device " + std::to_string(device)) +
           ": everything was copied, since no memory could be pinned for the tables that tell what has not changed: "
           "raise host_limit or pinned_limit";
}

std::vector<int> Pause::devices() const {
  std::vector<int> devices;
  for (const auto& [device, work] : work_) {
    // What is away is used by nothing that a trim would wait for.
    if (!is_trim_ || !work.dropped.empty()) devices.push_back(device);
  }
  return devices;
}

void Pause::run_device(int device) {
  DeviceWork& work = work_.at(device);
  if (!work.leaving.empty()) move_out(work);
  if (hands_over_memory()) drop(work);
}

void Pause::move_out(DeviceWork& work) {
  work.expects_change = expects_change(work);
  if (work.expects_change)
    work.scan->launch_before_copies();
  else if (work.scan != nullptr)
    work.scan->launch();
  std::optional<Copy> copy;  // its threads are not started where nothing must be copied
  std::vector<Leaving*> submitted;
  for (Leaving& leaving : work.leaving) {
    decide(work, leaving);
    if (leaving.ranges.empty()) {
      land(work, leaving);
    } else {
      if (!copy) copy.emplace(work.engine->engine(), CopyDirection::kToStore, work.engine->cut());
      submitted.push_back(&leaving);
      submit(work, *copy, leaving);
    }
    while (const auto job = copy ? copy->poll_landed() : std::nullopt) land(work, *submitted[*job]);
  }
  while (const auto job = copy ? copy->finish_next() : std::nullopt) land(work, *submitted[*job]);
}

void Pause::run_last() {
  if (is_trim_) forget_what_is_away();
  for (auto& [device, work] : work_) {
    if (work.has_dropped || work.dropped.empty()) continue;
    const ContextScope scope(device);
    drop(work);
  }
  for (const auto& allocation : chosen_) {
    allocation->is_paused.store(!is_trim_);
    note_what_was_left(*allocation);
  }
  for (const Judged& judged : judged_) judged.allocation->is_unused = judged.is_unused;
}

// What lies on the host stayed there: a backup that was retained has older bytes of it.
void Pause::note_what_was_left(const Allocation& allocation) noexcept {
  const auto stored = core().registry.backup_of(allocation);
  if (stored == nullptr) return;
  for (const Chunk& chunk : allocation.chunks) {
    if (!chunk.is_on_host()) continue;
    for (size_t block = chunk.first_block(); block < chunk.end_block(); ++block)
      stored->blocks[block].has_content = false;
  }
}

// After a failure: what left whole is paused, though the rest is not.
void Pause::note_paused() noexcept {
  for (const Kept& kept : kept_) {
    if (kept.is_attached && kept.allocation->device_bytes() == 0) kept.allocation->is_paused.store(true);
  }
}

void Pause::settle() noexcept {
  for (auto& [device, work] : work_) {
    // What was retained of an earlier pause is of no use once the content was dropped.
    for (const Departure& departure : work.dropped) {
      for (const auto& [allocation, chunk] : departure.chunks) {
        if (allocation->resident_bytes() == 0 && !allocation->is_any_stored())
          core().registry.set_backup(*allocation, nullptr);
      }
    }
  }
  work_.clear();
  note_paused();
  for (const Noted& noted : noted_) {
    const Allocation& allocation = *noted.allocation;
    if (!allocation.is_paused.load() && allocation.resident_bytes() == noted.resident_bytes)
      request_.moved->forget(allocation);
  }
  noted_.clear();
  chosen_.clear();
  for (const Judged& judged : judged_) {
    const Allocation& allocation = *judged.allocation;
    if (!allocation.is_paused.load() && !allocation.is_away()) continue;
    keep_verdicts_of_what_stayed(judged);
    core().registry.set_verdicts(*judged.allocation, judged.verdicts);
  }
  judged_.clear();
  for (const Kept& kept : kept_) {
    if (kept.stored != nullptr && kept.allocation->device_bytes() > 0) forget_what_stayed(kept);
  }
  kept_.clear();
}

}  // namespace ebbtide
