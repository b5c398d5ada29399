#include "store/store.h"

#include "base/error.h"
#include "store/ram_store.h"

namespace ebbtide {

Store& store_of(BackupKind kind) {
  static RamStore* const ram = new RamStore;
  switch (kind) {
    case BackupKind::kRam: return *ram;
    case BackupKind::kPinned: throw InvalidArgument("backup=\"pinned\" is not built yet: use backup=\"ram\"");
    case BackupKind::kDisk: throw InvalidArgument("backup=\"disk\" is not built yet: use backup=\"ram\"");
    case BackupKind::kNone: break;
  }
  throw InvalidArgument("unknown backup kind " + std::to_string(static_cast<int>(kind)) +
                        ": it is none, ram, pinned or disk");
}

}  // namespace ebbtide
