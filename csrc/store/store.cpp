#include "store/store.h"

#include <string>

#include "base/error.h"
#include "store/disk_store.h"
#include "store/pinned_store.h"
#include "store/ram_store.h"

namespace ebbtide {

Store& store_of(BackupKind kind) {
  static RamStore* const ram = new RamStore;
  static PinnedStore* const pinned = new PinnedStore;
  static DiskStore* const disk = new DiskStore;
  switch (kind) {
    case BackupKind::kRam: return *ram;
    case BackupKind::kPinned: return *pinned;
    case BackupKind::kDisk: return *disk;
    case BackupKind::kNone: break;
  }
  throw InvalidArgument("there is no store for backup kind " + std::to_string(static_cast<int>(kind)) +
                        ": it is ram (1), pinned (2) or disk (3)");
}

}  // namespace ebbtide
