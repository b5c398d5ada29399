#pragma once

#include <string>

// The folder of disk backups, and whether it can hold any.
namespace ebbtide {

// Sets the folder from now on; "" for the choice of the variables.
void set_disk_directory(const std::string& chosen);
// The folder that was set, else EBBTIDE_DISK_DIRECTORY, else TMPDIR, else /var/tmp.
std::string disk_directory();
// Throws the StoreError that a backup there would cause: the folder is missing, not writable, or not on a disk.
void check_disk_directory(const std::string& directory);
// Advice for a user whose folder can't be used: to change the setting that chose it.
std::string advice_on_disk_directory(const std::string& directory);

}  // namespace ebbtide
