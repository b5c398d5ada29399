#include "core/move/backups.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "base/log.h"
#include "driver/context.h"
#include "policy/pinning.h"
#include "store/populate.h"

namespace ebbtide {

void BackupUse::add_need(size_t first_block, size_t end_block) {
  for (size_t block = first_block; block < end_block; ++block) {
    const bool is_touched = stored != nullptr && stored->blocks[block].is_touched;
    if (!is_touched && !is_unused[block]) needed_bytes += kernels::kBlockBytes;
  }
}

void open_backup(Core& core, BackupKind kind, BackupUse& use) {
  const size_t size_bytes = use.allocation->size_bytes();
  PinnedCharge pinned;
  if (kind == BackupKind::kPinned) pinned = core.budgets.pinned.charge(size_bytes, "a pinned backup");
  auto stored = std::make_shared<BackupRecord>(kind, open_backup(kind, size_bytes), size_bytes);
  stored->device = use.allocation->device;
  stored->pinned = std::move(pinned);
  use.stored = std::move(stored);
}

HostHolder& backup_holder(Core& core, const Tag& tag) {
  return core.budgets.host.holder("backups of '" + tag.name + "'");
}

void charge_backups(Core& core, const std::vector<BackupUse*>& uses, const std::string& purpose, bool is_spare) {
  uint64_t bytes = 0;
  std::string tags;
  const Tag* last = nullptr;
  for (BackupUse* use : uses) {
    if (use->stored != nullptr) use->kind = use->stored->kind;
    // A pinned backup is pinned whole, and a file takes none.
    if (use->kind != BackupKind::kRam) use->needed_bytes = 0;
    if (use->kind == BackupKind::kPinned && !use->had_backup) use->needed_bytes = use->allocation->size_bytes();
    if (use->needed_bytes == 0) continue;
    bytes += use->needed_bytes;
    const Tag* const tag = use->allocation->tag;
    if (tag != last) tags += (last == nullptr ? "'" : ", '") + tag->name + "'";
    last = tag;
  }
  if (bytes > 0) {
    HostBudget& budget = core.budgets.host;
    HostHolder& backups = budget.holder("backups");
    HostCharge charge = is_spare ? budget.charge_spare(bytes, purpose + tags, &backups)
                                 : budget.charge(bytes, purpose + tags, &backups);
    HostHolder* holder = nullptr;
    last = nullptr;
    for (BackupUse* use : uses) {
      if (use->needed_bytes == 0) continue;
      if (std::exchange(last, use->allocation->tag) != use->allocation->tag) holder = &backup_holder(core, *last);
      use->charge = charge.split_promised(use->needed_bytes);
      use->charge.hold_for(*holder);
    }
  }
  std::vector<std::shared_ptr<BackupRecord>> pinned;
  for (BackupUse* use : uses) {
    if (use->stored == nullptr) open_backup(core, use->kind, *use);
    if (use->kind != BackupKind::kPinned || use->had_backup) continue;
    use->stored->charge = std::move(use->charge);
    pinned.push_back(use->stored);
  }
  if (!pinned.empty()) populate_backups(pinned, uses.front()->allocation->device);
}

void attach_backup(Core& core, BackupUse& use) {
  if (use.is_attached) return;
  core.registry.replace(use.allocation->stored, use.stored);
  use.is_attached = true;
}

void reclaim_backup(const BackupUse& use, const Chunk& chunk, std::span<const CopyRange> ranges) {
  if (!use.had_backup) return;
  for (const CopyRange& range : ranges) {
    const size_t offset = chunk.offset + range.offset;
    const auto first = use.stored->blocks.begin() + static_cast<std::ptrdiff_t>(offset / kernels::kBlockBytes);
    const auto end = first + static_cast<std::ptrdiff_t>(range.size_bytes / kernels::kBlockBytes);
    if (!std::all_of(first, end, std::mem_fn(&StoredBlock::is_touched)))
      use.stored->backup->reclaim(offset, range.size_bytes);
  }
}

void discard_untouched(const BackupUse& use) noexcept {
  for (const Chunk& chunk : use.allocation->chunks) {
    if (!chunk.is_on_device()) continue;
    for (size_t block = chunk.first_block(); block < chunk.end_block(); ++block) {
      StoredBlock& stored = use.stored->blocks[block];
      if (stored.is_touched) continue;
      // The digest goes with the pages: else the next pause would take the block for clean.
      stored.has_digest = false;
      use.stored->backup->discard(block * kernels::kBlockBytes, kernels::kBlockBytes);
    }
  }
}

void populate_backups(std::span<const std::shared_ptr<BackupRecord>> backups, int device) {
  if (backups.empty()) return;
  const ContextScope scope(device);
  std::vector<std::pair<Backup*, size_t>> opened;
  uint64_t bytes = 0;
  for (const auto& stored : backups) {
    opened.emplace_back(stored->backup.get(), stored->size_bytes());
    bytes += stored->size_bytes();
  }
  populate_all(opened, populate_threads(bytes));
  for (const auto& stored : backups) {
    stored->charge.touch(stored->size_bytes());
    for (StoredBlock& block : stored->blocks) block.is_touched = true;
  }
}

namespace {

// Pages that a backup lacked, taken for it. They go back unless they are kept.
class TakenPages {
 public:
  explicit TakenPages(BackupRecord& stored) : stored_(stored) {}
  TakenPages(const TakenPages&) = delete;
  TakenPages& operator=(const TakenPages&) = delete;
  ~TakenPages() {
    for (const size_t block : taken_) {
      stored_.backup->discard(block * kernels::kBlockBytes, kernels::kBlockBytes);
      stored_.blocks[block].is_touched = false;
    }
    stored_.charge.give_back_touched(taken_.size() * kernels::kBlockBytes);
  }
  // Throws StoreError.
  void take(HostCharge charge) {
    for (size_t block = 0; block < stored_.blocks.size(); ++block) {
      if (stored_.blocks[block].is_touched) continue;
      taken_.push_back(block);
      touch_blocks(stored_, charge, block, 1);
      stored_.backup->populate(block * kernels::kBlockBytes, kernels::kBlockBytes);
    }
  }
  void keep() { taken_.clear(); }

 private:
  BackupRecord& stored_;
  std::vector<size_t> taken_;
};

}  // namespace

BackupPinning::BackupPinning(Core& core, uint64_t backup_bytes)
    : core_(core),
      // Memory pinned for speed would be missing for the rings, which pauses need, and pauses after copies ahead are to
      // be quick.
      is_on_(policy::is_small_pause(backup_bytes) && !core.rules.keeps_ahead.load() &&
             core.budgets.pinned.limit_bytes() == kUnlimited) {}

bool BackupPinning::may_take(uint64_t missing_bytes) {
  if (missing_bytes == 0) return true;
  if (missing_bytes > policy::kMostTakenBytes) return false;
  if (!takeable_bytes_) takeable_bytes_ = policy::takeable_bytes(core_.budgets.host.available_bytes());
  return missing_bytes <= *takeable_bytes_;
}

void BackupPinning::try_pin(BackupRecord& stored, const Tag& tag) noexcept {
  if (!is_on_ || !stored.may_be_pinned || stored.is_pinned()) return;
  const auto& blocks = stored.blocks;
  const auto touched = static_cast<uint64_t>(
      std::count_if(blocks.begin(), blocks.end(), [](const StoredBlock& block) { return block.is_touched; }));
  const uint64_t missing_bytes = stored.size_bytes() - touched * kernels::kBlockBytes;
  if (touched == 0) return;  // nothing of it was ever copied
  if (std::none_of(blocks.begin(), blocks.end(), [](const StoredBlock& block) { return block.has_content; })) return;
  try {
    if (!may_take(missing_bytes)) return;
    const ContextScope scope(stored.device);
    // Charged before it is judged, so that no two threads pass together.
    PinnedCharge pinned = core_.budgets.pinned.charge(stored.size_bytes(), "a small backup");
    const uint64_t others = saturating_subtract(core_.budgets.pinned.held_bytes(), stored.size_bytes());
    const uint64_t ram = std::min(core_.budgets.host.ram_bytes(), core_.budgets.host.limit_bytes());
    TakenPages pages(stored);
    if (policy::has_room_to_pin(stored.size_bytes(), others, ram)) {
      if (missing_bytes > 0) {
        pages.take(core_.budgets.host.charge_spare(missing_bytes, "a small backup", &backup_holder(core_, tag)));
      }
      if (stored.backup->try_pin()) {
        stored.pinned = std::move(pinned);
        pages.keep();
        if (takeable_bytes_) *takeable_bytes_ -= missing_bytes;
      }
    }
    stored.may_be_pinned = false;
  } catch (const std::exception& error) {
    // The host is short at the moment: the next pause asks again.
    log_line(LogLevel::kInfo, {"a small backup stays unpinned: ", error.what()});
  }
}

void touch_blocks(BackupRecord& stored, HostCharge& charge, size_t first, size_t count) {
  uint64_t bytes = 0;
  for (size_t block = first; block < first + count; ++block) {
    bytes += stored.blocks[block].is_touched ? 0 : kernels::kBlockBytes;
    stored.blocks[block].is_touched = true;
  }
  HostCharge touched = charge.split_promised(bytes);
  touched.touch(bytes);
  stored.charge.merge(std::move(touched));
}

void add_block(std::vector<CopyRange>& ranges, size_t offset) {
  if (!ranges.empty() && ranges.back().offset + ranges.back().size_bytes == offset) {
    ranges.back().size_bytes += kernels::kBlockBytes;
  } else {
    ranges.push_back({offset, kernels::kBlockBytes});
  }
}

}  // namespace ebbtide
