#pragma once

#include <memory>
#include <span>

#include "core/state/core.h"

// How allocations get their backups.
namespace ebbtide {

// A new backup, with nothing in it and no host memory claimed; a pinned one has its share of the pinned budget. Throws StoreError.
std::shared_ptr<BackupRecord> open_backup(Core& core, BackupKind kind, const Allocation& allocation);

// Takes the memory of whole backups now, by several threads; their claims have promised it. Pinned ones are pinned, through the context of this device. Throws StoreError: some are then
// ready, others not.
void populate_backups(std::span<const std::shared_ptr<BackupRecord>> backups, int device);

}  // namespace ebbtide
