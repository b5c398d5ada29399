#pragma once

// What torch_memory_saver keeps for the whole process.
namespace ebbtide::compat {

// Whether a resume keeps the backups in host memory.
bool retains() noexcept;

// Makes disk backups go to named files, in TMS_DISK_BACKUP_DIR unless the program or EBBTIDE_DISK_DIRECTORY chose a
// folder.
void use_disk_directory() noexcept;

}  // namespace ebbtide::compat
