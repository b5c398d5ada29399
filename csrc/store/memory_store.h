#pragma once

#include "store/store.h"

namespace ebbtide {

// Backups in anonymous memory, in huge pages if the system has them. kPinned pins all of it in seal(), and kRam in
// try_pin(): then the copy engine accesses it without the staging ring. Both need a current context, and no capture
// under way (cuMemHostRegister breaks one); so does the destructor, which unpins, in any thread. Pinned memory stays so
// for the life of the backup and is rewritten in place, since pinning costs as much as a copy.
std::unique_ptr<Backup> open_memory_backup(BackupKind kind, size_t size_bytes);

}  // namespace ebbtide
