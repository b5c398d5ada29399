#include "compat/variables.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

#include "api/ebbtide.h"
#include "base/log.h"
#include "base/settings.h"
#include "base/text.h"

namespace ebbtide::compat {
namespace {

std::string_view text_of(const char* variable) noexcept {
  const char* const text = std::getenv(variable);
  return text == nullptr ? std::string_view() : text;
}

void say(const char* variable, std::string_view text, const char* wanted) {
  log_line(LogLevel::kError, {variable, " must be ", wanted, ", not ", in_quotes(text), "; it is ignored"});
}

bool read_switch(const char* variable) {
  const std::string_view text = text_of(variable);
  for (const std::string_view word : {"1", "true", "TRUE", "yes", "YES"}) {
    if (text == word) return true;
  }
  for (const std::string_view word : {"", "0", "false", "FALSE", "no", "NO"}) {
    if (text == word) return false;
  }
  say(variable, text, "0 or 1");
  return false;
}

int32_t read_cpu_backup() {
  constexpr const char* kVariable = "TMS_INIT_CPU_BACKUP_BACKEND";
  const int32_t kind = read_backend(std::getenv(kVariable));
  if (kind >= 0) return kind;
  say(kVariable, text_of(kVariable), "pinned or mmap");
  return EBBTIDE_BACKUP_PINNED;
}

Variables read() {
  Variables read;
  read.is_enabled = read_switch("TMS_INIT_ENABLE");
  read.retains = read_switch("TMS_RETAIN_CPU_BACKUP");
  read.cpu_backup = read_cpu_backup();
  const bool has_cpu = read_switch("TMS_INIT_ENABLE_CPU_BACKUP");
  const bool has_disk = read_switch("TMS_INIT_ENABLE_DISK_BACKUP");
  if (has_cpu && has_disk) {
    log_line(LogLevel::kError,
             {"TMS_INIT_ENABLE_CPU_BACKUP and TMS_INIT_ENABLE_DISK_BACKUP exclude each other: backups are on disk"});
  }
  const int32_t kind = has_cpu ? read.cpu_backup : static_cast<int32_t>(EBBTIDE_BACKUP_NONE);
  read.backup = has_disk ? static_cast<int32_t>(EBBTIDE_BACKUP_DISK) : kind;
  const std::string_view directory = text_of("TMS_DISK_BACKUP_DIR");
  if (!directory.empty() && variable_text(Setting::kDiskDirectory) == nullptr) {
    // Absolute and a copy, since the program may change its folder and its environment. Leaked on purpose.
    std::error_code ignored;
    const std::string full = std::filesystem::absolute(directory, ignored).string();
    read.disk_directory = ::strdup(full.empty() ? std::string(directory).c_str() : full.c_str());
    // As torch_memory_saver makes it. Its faults are reported where it is checked.
    std::filesystem::create_directories(read.disk_directory, ignored);
  }
  return read;
}

}  // namespace

int32_t read_backend(const char* word) noexcept {
  const std::string_view text = word == nullptr ? "" : word;
  if (text.empty() || text == "pinned") return EBBTIDE_BACKUP_PINNED;
  return text == "mmap" ? static_cast<int32_t>(EBBTIDE_BACKUP_RAM) : -1;
}

const Variables& variables() noexcept {
  static const Variables instance = read();
  return instance;
}

}  // namespace ebbtide::compat
