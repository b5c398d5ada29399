#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/shared.h"
#include "core/budget/host_budget.h"
#include "core/budget/pinned_budget.h"
#include "kernels/blocks.h"
#include "store/store.h"

namespace ebbtide {

// The record of one block of an allocation (kernels::kBlockBytes): its value while it is away, and the content of its
// range in the store.
struct StoredBlock {
  kernels::Digest digest;    // of the bytes in the store, where has_digest
  kernels::Value value;      // of all of the block while it is away, where is_constant
  bool is_constant = false;  // else the bytes in the store do
  bool is_unused = false;    // the constant of dropped content, since the block was not in use when it left
  bool has_digest = false;
  bool is_touched = false;  // its pages in the store are in the charge
  // The value, or the bytes in the store, are those of the last time that the block left. False after a pause that
  // failed before it left, and where nothing was ever stored.
  bool has_content = false;

  void mark_constant(const kernels::Value& constant) {
    value = constant;
    is_constant = true;
    is_unused = false;
  }
  void mark_unused(const kernels::Value& dropped) {
    mark_constant(dropped);
    is_unused = true;
  }
  void mark_stored() { is_constant = is_unused = false; }
};

// The bytes of an allocation while they are away or retained, with the charge for their host memory. It belongs to the
// holder of the allocation, and to each view of the bytes, which also holds `views` or `windows`. With views, the bytes
// are neither overwritten nor given back. With windows, they are not given back, and a pause that overwrites them
// writes all blocks that the windows show, also those of one value.
struct BackupRecord {
  BackupRecord(BackupKind backup_kind, std::unique_ptr<Backup> opened, size_t size_bytes)
      : kind(backup_kind), backup(std::move(opened)), blocks(size_bytes / kernels::kBlockBytes) {}
  BackupRecord(const BackupRecord&) = delete;
  BackupRecord& operator=(const BackupRecord&) = delete;
  ~BackupRecord() {
    if (!backup->is_abandoned()) return;
    charge.keep_for_good();
    pinned.keep_for_good();
  }
  size_t size_bytes() const { return blocks.size() * kernels::kBlockBytes; }
  const BackupKind kind;
  HostCharge charge;
  PinnedCharge pinned;
  const std::unique_ptr<Backup> backup;  // goes before its charges do
  std::vector<StoredBlock> blocks;
  std::shared_ptr<void> views = std::make_shared<char>();
  std::shared_ptr<void> windows = std::make_shared<char>();

  int device = 0;  // of the allocation
  // No policy asks to keep it: while the content is on the device, it may go at any time (SpareBackups). The holder of
  // the allocation writes it; the registry's lock guards it.
  bool is_spare = false;
  bool may_be_pinned = true;  // false: it was tried, or judged, and is not tried again
  // Of DeferredFrees.
  std::shared_ptr<BackupRecord> next_deferred;
  bool is_deferred = false;

  // Unpinning breaks a capture, so it can't go beside one.
  bool is_pinned() const { return backup->direct() != nullptr; }
  bool has_views() const { return is_shared(views); }
  bool has_windows() const { return is_shared(windows); }
  bool is_looked_at() const { return has_views() || has_windows(); }
};

}  // namespace ebbtide
