#include "store/store.h"

#include <string>

#include "base/error.h"
#include "store/disk_store.h"
#include "store/memory_store.h"

namespace ebbtide {

void require_store(BackupKind kind) {
  if (kind == BackupKind::kRam || kind == BackupKind::kPinned || kind == BackupKind::kDisk) return;
  throw InvalidArgument("there is no store for backup kind " + std::to_string(static_cast<int>(kind)) +
                        ": it is ram (1), pinned (2) or disk (3)");
}

std::unique_ptr<Backup> open_backup(BackupKind kind, size_t size_bytes) {
  require_store(kind);
  return kind == BackupKind::kDisk ? open_disk_backup(size_bytes) : open_memory_backup(kind, size_bytes);
}

}  // namespace ebbtide
