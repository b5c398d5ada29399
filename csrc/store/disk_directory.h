#pragma once

#include <string>

// The folder of disk backups, and whether it can hold any.
namespace ebbtide {

// From now on; "" for what the variables say.
void set_disk_directory(const std::string& chosen);
// What was set, else EBBTIDE_DISK_DIRECTORY, else TMPDIR, else /var/tmp.
std::string disk_directory();
// Throws the StoreError that a backup there would meet: it does not exist, can't be written, or is no disk.
void check_disk_directory(const std::string& directory);
// What a user is to do about this folder, which can't be used: changes what chose it.
std::string advice_on_disk_directory(const std::string& directory);

}  // namespace ebbtide
