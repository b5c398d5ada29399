#include "compat/backups.h"

#include <atomic>
#include <climits>
#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>

#include "api/ebbtide.h"
#include "api/ebbtide_settings.h"
#include "base/growing_list.h"
#include "base/log.h"
#include "base/settings.h"
#include "compat/variables.h"

namespace ebbtide::compat {
namespace {

enum class Choice { kVariable, kKeep, kDrop };
constinit std::atomic<Choice> retain_choice{Choice::kVariable};

constinit GrowingList<std::string> chosen_directories;  // absolute; the newest one is in force

const std::string* chosen_directory() noexcept {
  return chosen_directories.find([](const std::string&) { return true; });
}

// Whether it was taken. If not, a line says why.
bool configure(const char* call, const char* setting, const char* value) noexcept {
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  if (ebbtide_configure(setting, value, &error) == EBBTIDE_OK) return true;
  log_line(LogLevel::kError, {call, ": ", error.message});
  return false;
}

void make_folder(const std::string& path) noexcept {
  try {
    std::error_code ignored;
    std::filesystem::create_directories(path, ignored);
  } catch (...) {
    // No memory for the path: its use reports that there is no folder.
  }
}

// torch_memory_saver's users look for the files in the folder. A folder in RAM is allowed for named files alone, so the
// names come first.
void name_files(const char* call) noexcept {
  if (variable_text(Setting::kDiskFiles) == nullptr) configure(call, "disk_files", "named");
}

void choose_directory(const char* call, const char* directory) noexcept {
  name_files(call);
  try {
    std::error_code ignored;
    const std::string full = std::filesystem::absolute(directory, ignored).string();
    make_folder(full);
    if (!configure(call, "disk_directory", directory)) return;
    chosen_directories.add(full.empty() ? directory : full);
  } catch (...) {
    // No memory for the path: the folder is not made again should it vanish.
  }
}

}  // namespace

bool retains() noexcept {
  const Choice choice = retain_choice.load();
  return choice == Choice::kVariable ? variables().retains : choice == Choice::kKeep;
}

void use_disk_directory() noexcept {
  if (chosen_directory() != nullptr) return;
  const char* const directory = variables().disk_directory;
  if (directory != nullptr) return choose_directory("TMS_DISK_BACKUP_DIR", directory);
  name_files("tms_set_enable_disk_backup");
}

void remake_disk_directory() noexcept {
  const std::string* const chosen = chosen_directory();
  char in_force[PATH_MAX];
  if (chosen == nullptr ||
      ebbtide_get_setting("disk_directory", in_force, sizeof in_force, nullptr, nullptr) != EBBTIDE_OK ||
      *chosen != in_force)
    return;
  make_folder(*chosen);
}

}  // namespace ebbtide::compat

using namespace ebbtide;

extern "C" {

EBBTIDE_API void tms_set_retain_cpu_backup(bool is_on) {
  compat::retain_choice.store(is_on ? compat::Choice::kKeep : compat::Choice::kDrop);
}
EBBTIDE_API bool tms_get_retain_cpu_backup() { return compat::retains(); }

EBBTIDE_API void tms_set_disk_backup_dir(const char* directory) {
  if (directory == nullptr) {
    log_line(LogLevel::kError, {"tms_set_disk_backup_dir: the folder is null"});
    return;
  }
  compat::choose_directory("tms_set_disk_backup_dir", directory);
}

EBBTIDE_API void set_memory_margin_bytes(uint64_t bytes) {
  compat::configure("set_memory_margin_bytes", "device_margin", std::to_string(bytes).c_str());
}

}  // extern "C"
