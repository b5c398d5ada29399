#pragma once

#include <string>

#include "store/backup_file.h"
#include "store/store.h"

namespace ebbtide {

// The directory of backups that are opened from now on; empty: EBBTIDE_DISK_DIRECTORY, else TMPDIR, else /var/tmp.
void set_disk_directory(const std::string& directory);
std::string disk_directory();

// One file for each backup, past the page cache where the file system can. Several threads make several requests at once.
class DiskStore : public Store {
 public:
  explicit DiskStore(const FileCalls& calls = kSystemFileCalls) : calls_(calls) {}
  std::unique_ptr<Backup> open(size_t size_bytes) override;

 private:
  const FileCalls& calls_;
};

}  // namespace ebbtide
