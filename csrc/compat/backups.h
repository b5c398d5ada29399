#pragma once

// What torch_memory_saver keeps for the whole process.
namespace ebbtide::compat {

// Whether a resume keeps the backups in host memory.
bool retains() noexcept;

// As torch_memory_saver makes the folder of its backups.
void make_directory(const char* path) noexcept;

// Whether backups in that folder have names, as torch_memory_saver's have: EBBTIDE_DISK_FILES does not say otherwise.
bool shows_files() noexcept;

// Makes disk backups go to TMS_DISK_BACKUP_DIR, unless the program or EBBTIDE_DISK_DIRECTORY chose a folder.
void use_disk_directory() noexcept;

}  // namespace ebbtide::compat
