#pragma once

#include <memory>
#include <span>
#include <vector>

#include "core/state/core.h"
#include "store/copy_queue.h"

// Backups of allocations: opening them, and taking their memory.
namespace ebbtide {

// A new backup without content. No host memory is charged yet; a pinned one is charged to the pinned budget. Throws
// StoreError.
std::shared_ptr<BackupRecord> open_backup(Core& core, BackupKind kind, const Allocation& allocation);

// Takes the memory of whole backups now, in several threads. Their charges have promised it. Pinned backups are pinned
// through the context of this device. Throws StoreError, with some of them ready and others not.
void populate_backups(std::span<const std::shared_ptr<BackupRecord>> backups, int device);

// Pins a backup in RAM that holds what an earlier pause stored, and that has all of its pages, if pinned memory has no
// limit and policy::is_worth_pinning; else nothing changes. pause_bytes is that of policy::KeptBackup. Judges each
// backup once. Needs a current context and no capture.
void try_pin_kept(Core& core, BackupRecord& stored, uint64_t pause_bytes) noexcept;

// Blocks of a backup have got their pages, out of this charge.
void touch_blocks(BackupRecord& stored, HostCharge& charge, size_t first, size_t count);

// Adds the block at this offset to ranges, which are in order.
void add_block(std::vector<CopyRange>& ranges, size_t offset);

// Who holds the host memory of backups, by tag: "backups of 'weights'". The last one is remembered, since allocations
// come tag by tag.
class BackupHolders {
 public:
  explicit BackupHolders(Core& core) : budget_(core.budgets.host) {}
  HostHolder& of(const Tag& tag);

 private:
  HostBudget& budget_;
  const Tag* last_tag_ = nullptr;
  HostHolder* last_ = nullptr;
};

}  // namespace ebbtide
