#pragma once

#include "store/store.h"

namespace ebbtide {

// Backups in anonymous memory, in huge pages if the system has them, which is returned to the system with the backup.
//
// kPinned pins all of it in seal(), and kRam in try_pin(): then the copy engine accesses it without the staging ring.
// Both need a current context in the calling thread and no capture under way (cuMemHostRegister breaks one). Pinned
// memory stays so for the life of the backup and is rewritten in place, since pinning costs as much as a copy. The
// destructor unpins, in any thread; its caller makes sure that no capture is under way.
std::unique_ptr<Backup> open_memory_backup(BackupKind kind, size_t size_bytes);

}  // namespace ebbtide
