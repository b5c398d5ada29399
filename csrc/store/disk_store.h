#pragma once

#include "store/backup_file.h"
#include "store/disk_directory.h"
#include "store/store.h"

namespace ebbtide {

// One file for each backup, written past the page cache if the file system can. Several threads make several requests
// at once.
class DiskStore : public Store {
 public:
  explicit DiskStore(const FileCalls& calls = kSystemFileCalls) : calls_(calls) {}
  std::unique_ptr<Backup> open(size_t size_bytes) override;

 private:
  const FileCalls& calls_;
};

}  // namespace ebbtide
