#pragma once

// What torch_memory_saver keeps for the whole process.
namespace ebbtide::compat {

// Whether a resume keeps the backups in host memory.
bool retains() noexcept;

// Makes disk backups go to named files, in TMS_DISK_BACKUP_DIR unless the program or EBBTIDE_DISK_DIRECTORY chose a
// folder.
void use_disk_directory() noexcept;

// Makes the folder that the program or TMS_DISK_BACKUP_DIR chose again, where it is gone, as torch_memory_saver does at
// each backup. A failure shows where the backup is made.
void remake_disk_directory() noexcept;

}  // namespace ebbtide::compat
