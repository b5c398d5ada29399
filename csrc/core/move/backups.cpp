#include "core/move/backups.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/log.h"
#include "driver/context.h"
#include "policy/pinning.h"
#include "store/populate.h"

namespace ebbtide {

std::shared_ptr<BackupRecord> open_backup(Core& core, BackupKind kind, const Allocation& allocation) {
  const size_t size_bytes = allocation.size_bytes();
  PinnedCharge pinned;
  if (kind == BackupKind::kPinned) pinned = core.budgets.pinned.charge(size_bytes, "a pinned backup");
  auto stored = std::make_shared<BackupRecord>(kind, store_of(kind).open(size_bytes), size_bytes);
  stored->device = allocation.device;
  stored->pinned = std::move(pinned);
  return stored;
}

HostHolder& BackupHolders::of(const Tag& tag) {
  if (last_tag_ != &tag) {
    last_ = &budget_.holder("backups of '" + tag.name + "'");
    last_tag_ = &tag;
  }
  return *last_;
}

void populate_backups(std::span<const std::shared_ptr<BackupRecord>> backups, int device) {
  if (backups.empty()) return;
  const ContextScope scope(device);
  std::vector<Backup*> opened;
  std::vector<size_t> sizes;
  uint64_t bytes = 0;
  for (const auto& stored : backups) {
    opened.push_back(stored->backup.get());
    sizes.push_back(stored->size_bytes());
    bytes += stored->size_bytes();
  }
  populate_all(opened, sizes, populate_threads(bytes));
  for (const auto& stored : backups) {
    stored->charge.touch(stored->size_bytes());
    for (StoredBlock& block : stored->blocks) block.is_touched = true;
  }
}

bool may_pin_kept(const Core& core, uint64_t backup_bytes) {
  return policy::is_small_pause(backup_bytes) && !core.rules.keeps_ahead.load() &&
         core.budgets.pinned.limit_bytes() == kUnlimited;
}

namespace {

// The pages that the backup lacks.
void take_missing(Core& core, BackupRecord& stored, uint64_t missing_bytes, const Tag& tag) {
  if (missing_bytes == 0) return;
  HostCharge charge = core.budgets.host.charge_spare(missing_bytes, "a small backup", &BackupHolders(core).of(tag));
  for (size_t block = 0; block < stored.blocks.size(); ++block) {
    if (stored.blocks[block].is_touched) continue;
    touch_blocks(stored, charge, block, 1);
    stored.backup->populate(block * kernels::kBlockBytes, kernels::kBlockBytes);
  }
}

}  // namespace

void try_pin_kept(Core& core, BackupRecord& stored, const Tag& tag) noexcept {
  const auto& blocks = stored.blocks;
  const auto missing =
      std::count_if(blocks.begin(), blocks.end(), [](const StoredBlock& block) { return !block.is_touched; });
  const uint64_t missing_bytes = static_cast<uint64_t>(missing) * kernels::kBlockBytes;
  if (missing > 0 && !policy::is_little_to_take(missing_bytes, core.budgets.host.available_bytes())) return;
  if (std::none_of(blocks.begin(), blocks.end(), [](const StoredBlock& block) { return block.has_content; })) return;
  stored.may_be_pinned = false;
  try {
    const ContextScope scope(stored.device);
    // Charged before it is judged, so that no two threads pass together.
    PinnedCharge pinned = core.budgets.pinned.charge(stored.size_bytes(), "a small backup");
    const uint64_t others = saturating_subtract(core.budgets.pinned.held_bytes(), stored.size_bytes());
    const uint64_t ram = std::min(core.budgets.host.ram_bytes(), core.budgets.host.limit_bytes());
    if (!policy::has_room_to_pin(stored.size_bytes(), others, ram)) return;
    take_missing(core, stored, missing_bytes, tag);
    if (stored.backup->try_pin()) stored.pinned = std::move(pinned);
  } catch (const std::exception& error) {
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
