#include "store/disk_directory.h"

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>

#include "base/error.h"
#include "base/log.h"
#include "base/settings.h"
#include "store/backup_file.h"

namespace ebbtide {
namespace {

// Leaked on purpose, as all state of the core.
struct Directory {
  std::mutex mutex;
  std::string chosen;
  std::map<std::string, std::string> of_variables;  // relative texts of variables, and the folders they mean
};
Directory& directory() {
  static Directory* const instance = new Directory;
  return *instance;
}

constinit std::atomic<std::optional<DiskFiles>> chosen_files;

// Files are removed by name, wherever the program has moved to by then. A working directory that is gone leaves a path
// as it is: nothing can be made there.
std::string absolute(const std::string& path) {
  if (path.empty()) return path;
  std::error_code ignored;
  const std::string full = std::filesystem::absolute(path, ignored).string();
  return full.empty() ? path : full;
}

// A relative path in a variable means the folder that it names when it is first read.
std::string folder_of_variable(const std::string& path) {
  if (path.starts_with('/')) return path;
  const std::lock_guard lock(directory().mutex);
  return directory().of_variables.try_emplace(path, absolute(path)).first->second;
}

}  // namespace

void set_disk_directory(const std::string& chosen) {
  const std::string folder = absolute(chosen);
  const std::lock_guard lock(directory().mutex);
  directory().chosen = folder;
}

std::string chosen_disk_directory() {
  const std::lock_guard lock(directory().mutex);
  return directory().chosen;
}

std::string disk_directory() {
  if (std::string chosen = chosen_disk_directory(); !chosen.empty()) return chosen;
  for (const char* text : {variable_text(Setting::kDiskDirectory), static_cast<const char*>(std::getenv("TMPDIR"))}) {
    if (text != nullptr && *text != '\0') return folder_of_variable(text);
  }
  return "/var/tmp";
}

void set_disk_files(DiskFiles chosen) { chosen_files.store(chosen); }

DiskFiles disk_files() {
  if (const auto chosen = chosen_files.load()) return *chosen;
  return word_index(Setting::kDiskFiles) == 1 ? DiskFiles::kNamed : DiskFiles::kHidden;
}

DiskPlace disk_place() {
  const DiskFiles files = disk_files();
  const bool is_named_by_user = !chosen_disk_directory().empty() || variable_text(Setting::kDiskDirectory) != nullptr;
  return {disk_directory(), files, files == DiskFiles::kNamed && is_named_by_user};
}

void check_disk_directory(const std::string& directory, DiskFiles files) {
  BackupFile::check_directory({absolute(directory), files, files == DiskFiles::kNamed});
}

void say_bad_disk_variable() {
  const char* const path = variable_text(Setting::kDiskDirectory);
  if (path == nullptr) return;
  try {
    check_disk_directory(folder_of_variable(path));
  } catch (const Error& error) {
    if (!set_said(Setting::kDiskDirectory))
      log_line(LogLevel::kError, {"EBBTIDE_DISK_DIRECTORY: ", error.what(), ". Until then no disk backup works"});
  }
}

std::string advice_on_disk_directory(const std::string& directory) {
  const bool is_from_variables = chosen_disk_directory() != directory && disk_directory() == directory;
  return std::string(is_from_variables ? "set EBBTIDE_DISK_DIRECTORY to another directory"
                                       : "configure another directory as disk_directory") +
         ", or keep backups in RAM";
}

}  // namespace ebbtide
