#pragma once

#include <memory>
#include <optional>
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

// Pins backups in RAM that were kept, for one pause.
class KeptPinning {
 public:
  // backup_bytes: of all backups that the pause writes to.
  KeptPinning(Core& core, uint64_t backup_bytes);
  // If some of the backup was copied by an earlier pause, and it lacks few of its pages, which it gets. Where there is
  // no room, or the driver refuses, nothing changes; it is asked again if the host is only short of memory. No capture.
  void try_pin(BackupRecord& stored, const Tag& tag) noexcept;

 private:
  bool may_take(uint64_t missing_bytes);

  Core& core_;
  const bool is_on_;
  std::optional<uint64_t> takeable_bytes_;  // by this pause; read when it is needed
};

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
