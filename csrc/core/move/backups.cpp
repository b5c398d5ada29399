#include "core/move/backups.h"

#include <vector>

#include "driver/context.h"
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
