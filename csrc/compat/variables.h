#pragma once

#include <cstdint>

// The environment variables of torch_memory_saver.
namespace ebbtide::compat {

struct Variables {
  bool is_enabled = false;               // TMS_INIT_ENABLE: everything is tagged from the start
  bool retains = false;                  // TMS_RETAIN_CPU_BACKUP
  int32_t cpu_backup = 0;                // TMS_INIT_CPU_BACKUP_BACKEND, as an ebbtide_backup_kind
  int32_t backup = 0;                    // of TMS_INIT_ENABLE_CPU_BACKUP and TMS_INIT_ENABLE_DISK_BACKUP, likewise
  const char* disk_directory = nullptr;  // TMS_DISK_BACKUP_DIR; null where EBBTIDE_DISK_DIRECTORY is set
};

// Read at the first use. A malformed variable is reported in one line and then ignored.
const Variables& variables() noexcept;

// The backup kind that torch_memory_saver calls "pinned" (also "" and null) or "mmap"; -1 for another word.
int32_t read_backend(const char* word) noexcept;

}  // namespace ebbtide::compat
