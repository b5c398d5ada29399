#pragma once

#include <string>

// The folder of disk backups, and whether it can hold any.
namespace ebbtide {

// kHidden: files without a name, which go with the process however it ends. kNamed: store/named_file.h.
enum class DiskFiles { kHidden, kNamed };

struct DiskPlace {
  std::string directory;
  DiskFiles files = DiskFiles::kHidden;
  bool may_be_memory = false;  // a directory in RAM that the user has named, for files that he wants to see
};

// Sets the folder from now on; "" for the choice of the variables. A relative path means the folder that it names now.
void set_disk_directory(const std::string& chosen);
// Sets the kind of file from now on; before that EBBTIDE_DISK_FILES says it.
void set_disk_files(DiskFiles chosen);
// The folder that was set, as an absolute path; "" where the variables choose.
std::string chosen_disk_directory();
// The folder that was set, else EBBTIDE_DISK_DIRECTORY, else TMPDIR, else /var/tmp, as an absolute path.
std::string disk_directory();
DiskFiles disk_files();
// The settings of the next backup's file.
DiskPlace disk_place();
// Throws the StoreError that a backup there would cause, as a folder that the user named: it is missing, not writable,
// or not on a disk.
void check_disk_directory(const std::string& directory, DiskFiles files = disk_files());
// Where EBBTIDE_DISK_DIRECTORY names a folder in which no backup could be made: one line on stderr, now and not when a
// pause fails hours later. Once, and not where the problem was shown before.
void say_bad_disk_variable();
// Advice for a user whose folder can't be used: to change the setting that chose it.
std::string advice_on_disk_directory(const std::string& directory);

}  // namespace ebbtide
