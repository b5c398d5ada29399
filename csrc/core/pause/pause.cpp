#include "core/pause/pause.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "driver/context.h"

namespace ebbtide {

BackupKind Pause::kind_of(const Allocation& allocation) const {
  const auto found = request().backup_by_tag.find(allocation.tag->name);
  if (found != request().backup_by_tag.end()) return found->second;
  return request().backup.value_or(allocation.policy.backup);
}

TagClaim Pause::claim() const {
  return {.tags = request().tags,
          .concerns = [](const Allocation& allocation) { return allocation.wants_pause(); },
          .leases = TagClaim::Leases::kRefused,
          .finishes_tags = request().tags.addresses.empty(),
          .counts_as_pause = true};
}

// Of an allocation that is paused or away already, a pause takes only memory that a failure left behind. What a failure
// left unmapped has yet to be paused.
bool Pause::moves_content(const Allocation& allocation) const {
  const Amounts amounts = allocation.amounts();
  return !allocation.is_paused.load() && amounts.resident_bytes + amounts.detached_bytes > 0;
}

void Pause::count(Counters& counters, const ReportRow& total) const {
  ++counters.pauses;
  counters.bytes_paused += total.bytes;
  counters.bytes_to_host += total.copied;
  counters.bytes_clean += total.clean;
  counters.bytes_unused += total.unused;
  counters.bytes_constant += total.constant;
}

void Pause::prepare(const Allocations& allocations) {
  for (const auto& allocation : allocations) {
    add_row(*allocation);
    add(allocation);
  }
  for (PausedAllocation& paused : paused_) select(paused);
  if (!request().tags.addresses.empty()) refuse_shared();
  charge_backups(core(), {stored_.begin(), stored_.end()}, "the backup of ");
  for (const PausedAllocation* paused : stored_) {
    for (const Chunk& chunk : paused->allocation->chunks) {
      const CopyRange whole{0, chunk.size_bytes};
      if (chunk.is_on_device()) reclaim_backup(*paused, chunk, {&whole, 1});
    }
  }
  pin_backups();
  for (auto& [device, work] : work_) borrow_engine(device, work);
}

void Pause::add(const std::shared_ptr<Allocation>& allocation) {
  const auto earlier = allocation->verdicts;
  // Those of an earlier call where it left the allocation midway, which this one finishes.
  auto verdicts = earlier != nullptr && allocation->is_away()
                      ? std::make_shared<Verdicts>(*earlier)
                      : std::make_shared<Verdicts>(allocation->size_bytes() / kernels::kBlockBytes);
  PausedAllocation& paused = paused_.emplace_back(
      PausedAllocation{{allocation, unused_blocks(core(), request(), *allocation)}, earlier, std::move(verdicts)});
  // Recorded ahead, while that may still fail. settle() forgets those that did not move.
  const size_t resident_bytes = allocation->resident_bytes();
  if (request().paused_set == nullptr || allocation->is_paused.load() || resident_bytes == 0) return;
  if (request().paused_set->note(*allocation, allocation->tag->name)) paused.noted_bytes = resident_bytes;
}

// The backup that the allocation has, if it can take the bytes. An allocation that is partly away goes on with the one
// that it has: a second one for the rest is not kept, so no view of it may be open.
std::shared_ptr<BackupRecord> Pause::usable_backup(const Allocation& allocation, BackupKind kind) {
  const auto& stored = allocation.stored;
  if (stored == nullptr) return stored;
  if (allocation.is_away() && stored->has_views()) {
    throw StateError("tag '" + allocation.tag->name +
                         "' is partly away, and there is a view of its backup, which this pause would write into: "
                         "resume the tag, or let go of the view first",
                     Cause::kBackupView);
  }
  if (allocation.is_away()) return stored;
  return stored->kind == kind && !stored->has_views() ? stored : nullptr;
}

void Pause::select(PausedAllocation& paused) {
  Allocation& allocation = *paused.allocation;
  const BackupKind kind = kind_of(allocation);
  const bool is_dropping = kind == BackupKind::kNone;
  DeviceWork& work = work_[allocation.device];
  add_device(allocation.device);
  for (Chunk& chunk : allocation.chunks) {
    if (chunk.is_detached.load() && chunk.is_on_device() && !is_dropping) attach(allocation, chunk);
  }
  if (!is_dropping && allocation.device_bytes() > 0) {
    stored_.push_back(&paused);
    paused.stored = usable_backup(allocation, kind);
    paused.had_backup = paused.stored != nullptr;
    paused.kind = kind;
    for (const Chunk& chunk : allocation.chunks) {
      if (chunk.is_on_device()) paused.add_need(chunk.first_block(), chunk.end_block());
    }
  }
  for (Chunk& chunk : allocation.chunks) {
    const auto set_verdict = [&](Verdict verdict) {
      std::fill_n(paused.verdicts->begin() + static_cast<std::ptrdiff_t>(chunk.first_block()), chunk.block_count(),
                  verdict);
    };
    // A chunk on the host takes no device memory: it stays, unless the pause drops it. If a pause let it stay, no
    // later one drops it.
    if (chunk.is_on_host() && (!is_dropping || allocation.is_paused.load())) {
      set_verdict(Verdict::kOnHost);
    } else if (chunk.is_resident() && !is_dropping) {
      ++add_to_handle(work.handles, {&allocation, &chunk, &paused}).missing;
    } else if (chunk.backing->has_memory()) {
      if (chunk.is_resident()) set_verdict(Verdict::kDropped);
      add_to_handle(dropped_[allocation.device], {&allocation, &chunk});
    }
  }
}

// Memory that could not be mapped again still holds the bytes: they can leave only from behind its address.
void Pause::attach(const Allocation& allocation, Chunk& chunk) {
  const int device = allocation.device;
  const ContextScope scope(device);
  chunk.backing->mapping =
      core().peers.map(allocation.address() + chunk.offset, chunk.backing->memory, device, core().peers.of(device));
  chunk.is_detached.store(false, std::memory_order_release);
}

// Of allocations that were named one by one.
void Pause::refuse_shared() const {
  const auto is_any_shared = [](const Handles& handles) {
    return std::any_of(handles.begin(), handles.end(), has_others);
  };
  for (const auto& [device, work] : work_) {
    const auto dropped = dropped_.find(device);
    if (!is_any_shared(work.handles) && (dropped == dropped_.end() || !is_any_shared(dropped->second))) continue;
    throw StateError(
        "some of these allocations share a handle with others of their tag, with which a resume brought them back, and "
        "the device has no room to give each a handle of its own: pause the tag, make room, or resume with "
        "EBBTIDE_SHARED_HANDLE at 0");
  }
}

uint64_t Pause::leaving_bytes(int device) const {
  uint64_t bytes = 0;
  const auto add_all = [&](const Handles& handles) {
    for (const LeavingHandle& handle : handles) {
      const PhysicalMemory& memory = handle.chunks.front().chunk->backing->memory;
      bytes += memory.is_on_host() ? 0 : memory.size_bytes();
    }
  };
  if (const auto work = work_.find(device); work != work_.end()) add_all(work->second.handles);
  if (const auto dropped = dropped_.find(device); dropped != dropped_.end()) add_all(dropped->second);
  return bytes;
}

// A tag that goes and comes again and again need not pay for threads and a ring each time.
void Pause::pin_backups() {
  uint64_t bytes = 0;
  for (const PausedAllocation* paused : stored_) bytes += paused->stored->size_bytes();
  BackupPinning pinning(core(), bytes);
  for (const PausedAllocation* paused : stored_) {
    const Allocation& allocation = *paused->allocation;
    const bool is_repeated = paused->had_backup && paused->earlier != nullptr && !allocation.is_away();
    if (is_repeated && allocation.policy.retain && paused->stored->kind == BackupKind::kRam)
      pinning.try_pin(*paused->stored, *allocation.tag);
  }
}

void Pause::borrow_engine(int device, DeviceWork& work) {
  if (work.handles.empty()) return;
  uint64_t bytes = 0;
  policy::CopyNeed need = copy_need(0, 0);
  for (const LeavingHandle& handle : work.handles) {
    for (const LeavingChunk& leaving : handle.chunks) {
      bytes += leaving.chunk->size_bytes;
      const BackupRecord& stored = *leaving.paused->stored;
      if (stored.backup->direct() != nullptr) continue;
      need.has_files |= stored.kind == BackupKind::kDisk;
      for (size_t block = leaving.chunk->first_block(); block < leaving.chunk->end_block(); ++block) {
        if (leaving.paused->is_unused[block]) continue;
        need.bytes += kernels::kBlockBytes;
        if (stored.kind == BackupKind::kRam && !stored.blocks[block].is_touched)
          need.fresh_bytes += kernels::kBlockBytes;
      }
    }
  }
  need.devices = static_cast<int>(work_.size());
  need.is_swap = hands_over_memory();
  const SkipRules& skip = core().rules.skip;
  const size_t scanned_blocks = skip.constant.load() || skip.clean.load() ? bytes / kernels::kBlockBytes : 0;
  work.engine = std::make_unique<EnginePool::Loan>(
      core().engines.borrow(device, need, {.table_bytes = BlockScan::table_bytes(scanned_blocks)}));
  work.scan = BlockScan::create(*work.engine, scanned_blocks, core().digest_seed);
  if (work.scan == nullptr) return explain_missing_scan(device, scanned_blocks);
  for (LeavingHandle& handle : work.handles) {
    for (LeavingChunk& leaving : handle.chunks)
      leaving.first_scanned = work.scan->add(leaving.address(), leaving.chunk->size_bytes);
  }
}

void Pause::explain_missing_scan(int device, size_t scanned_blocks) {
  if (scanned_blocks == 0 || DeviceKernels::of(device) == nullptr) return;  // not wanted; logged
  add_note(device,
           "everything was copied, since no memory could be pinned for the tables that tell which blocks have not "
           "changed: raise host_limit or pinned_limit");
}

void Pause::run_last() {
  drop_all();
  for (const PausedAllocation& paused : paused_) {
    paused.allocation->is_paused.store(true);
    paused.allocation->is_unused =
        std::find(paused.is_unused.begin(), paused.is_unused.end(), false) == paused.is_unused.end();
    note_host_chunks(*paused.allocation);
  }
}

// Chunks on the host stayed there: a backup that was retained has older bytes of them.
void Pause::note_host_chunks(const Allocation& allocation) noexcept {
  const auto& stored = allocation.stored;
  if (stored == nullptr) return;
  for (const Chunk& chunk : allocation.chunks) {
    if (!chunk.is_on_host()) continue;
    for (size_t block = chunk.first_block(); block < chunk.end_block(); ++block)
      stored->blocks[block].has_content = false;
  }
}

void Pause::settle() noexcept {
  work_.clear();
  dropped_.clear();
  for (PausedAllocation& paused : paused_) {
    Allocation& allocation = *paused.allocation;
    forget_backup_if_dropped(allocation);
    // After a failure: an allocation that left whole is paused, though the rest is not.
    if (paused.is_attached && allocation.device_bytes() == 0) allocation.is_paused.store(true);
    if (paused.noted_bytes > 0 && !allocation.is_paused.load() && allocation.resident_bytes() == paused.noted_bytes)
      request().paused_set->forget(allocation);
    if ((paused.had_backup || paused.is_attached) && allocation.device_bytes() > 0) {
      discard_untouched(paused);
      // A backup that holds nothing goes whole.
      if (paused.is_attached && !paused.had_backup && !allocation.is_any_stored())
        core().registry.replace(allocation.stored, nullptr);
    }
    if (allocation.is_paused.load() || allocation.is_away()) {
      // Chunks that did not leave the device keep the verdicts of the pause before.
      for (const Chunk& chunk : allocation.chunks) {
        if (!chunk.is_on_device() || !chunk.is_resident()) continue;
        for (size_t block = chunk.first_block(); block < chunk.end_block(); ++block)
          (*paused.verdicts)[block] = paused.earlier == nullptr ? Verdict::kNone : (*paused.earlier)[block];
      }
      core().registry.replace(allocation.verdicts, paused.verdicts);
    }
  }
  stored_.clear();
  paused_.clear();
}

}  // namespace ebbtide
