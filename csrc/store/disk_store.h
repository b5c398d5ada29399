#pragma once

#include "store/backup_file.h"
#include "store/store.h"

namespace ebbtide {

// One file for each backup, written past the page cache if the file system can. Several threads make several requests
// at once. calls outlives it.
std::unique_ptr<Backup> open_disk_backup(size_t size_bytes, const FileCalls& calls = kSystemFileCalls);

}  // namespace ebbtide
