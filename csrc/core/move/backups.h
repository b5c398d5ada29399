#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/state/core.h"
#include "store/copy_queue.h"

// Backups of allocations: opening them, and taking their memory.
namespace ebbtide {

// An allocation and the backup that its blocks go to.
struct BackupUse {
  std::shared_ptr<Allocation> allocation;
  std::vector<bool> is_unused = {};  // by block
  // The allocation's, or a new one that it gets with attach_backup().
  std::shared_ptr<BackupRecord> stored = nullptr;
  bool had_backup = false;
  bool is_attached = false;
  uint64_t needed_bytes = 0;            // of a backup in unpinned memory: that may be touched
  HostCharge charge = {};               // for them
  BackupKind kind = BackupKind::kNone;  // of the one that charge_backups() opens where there is none

  // Adds the bytes that these blocks will touch to needed_bytes.
  void add_need(size_t first_block, size_t end_block);
};

// Opens a new backup without content. No host memory is charged yet; a pinned one is charged to the pinned budget.
// Throws StoreError.
void open_backup(Core& core, BackupKind kind, BackupUse& use);
// Charges the host memory that all of them need, at once, so that an error names all of it. Then opens those that are
// missing, and takes the memory of new pinned ones: a refusal touches no file. purpose: "the backup of ", for that
// error. is_spare: as of HostBudget::charge_spare. Throws StoreError.
void charge_backups(Core& core, const std::vector<BackupUse*>& uses, const std::string& purpose, bool is_spare = false);
// Takes the memory of whole backups now, in several threads. Their charges have promised it. Pinned backups are pinned
// through the context of this device. Throws StoreError, with some of them ready and others not.
void populate_backups(std::span<const std::shared_ptr<BackupRecord>> backups, int device);
void attach_backup(Core& core, BackupUse& use);
// Takes pages of a backup that goes on, in these ranges of a chunk, after an earlier failure gave them back. Throws
// StoreError.
void reclaim_backup(const BackupUse& use, const Chunk& chunk, std::span<const CopyRange> ranges);
// After a failure: gives back the pages of chunks that are still on the device and may have been copied already.
void discard_untouched(const BackupUse& use) noexcept;

// Pins retained backups in RAM, for one pause.
class BackupPinning {
 public:
  // backup_bytes: of all backups that the pause writes to.
  BackupPinning(Core& core, uint64_t backup_bytes);
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

// The holder of the host memory of the tag's backups: "backups of 'weights'".
HostHolder& backup_holder(Core& core, const Tag& tag);

}  // namespace ebbtide
