#include "store/disk_directory.h"

#include <cstdlib>
#include <mutex>
#include <optional>

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
  std::optional<DiskFiles> files;
};
Directory& directory() {
  static Directory* const instance = new Directory;
  return *instance;
}

std::optional<DiskFiles> chosen_files() {
  const std::lock_guard lock(directory().mutex);
  return directory().files;
}

}  // namespace

void set_disk_directory(const std::string& chosen) {
  const std::lock_guard lock(directory().mutex);
  directory().chosen = chosen;
}

std::string chosen_disk_directory() {
  const std::lock_guard lock(directory().mutex);
  return directory().chosen;
}

std::string disk_directory() {
  if (std::string chosen = chosen_disk_directory(); !chosen.empty()) return chosen;
  for (const char* text : {variable_text(Setting::kDiskDirectory), static_cast<const char*>(std::getenv("TMPDIR"))}) {
    if (text != nullptr && *text != '\0') return text;
  }
  return "/var/tmp";
}

void set_disk_files(DiskFiles chosen) {
  const std::lock_guard lock(directory().mutex);
  directory().files = chosen;
}

DiskFiles disk_files() {
  if (const auto chosen = chosen_files()) return *chosen;
  return word_index(Setting::kDiskFiles) == 1 ? DiskFiles::kNamed : DiskFiles::kHidden;
}

DiskPlace disk_place() {
  const DiskFiles files = disk_files();
  const bool is_named_by_user = !chosen_disk_directory().empty() || variable_text(Setting::kDiskDirectory) != nullptr;
  return {disk_directory(), files, files == DiskFiles::kNamed && is_named_by_user};
}

void check_disk_directory(const std::string& directory, DiskFiles files) {
  BackupFile::check_directory({directory, files, files == DiskFiles::kNamed});
}

void say_bad_disk_variable() {
  const char* const path = variable_text(Setting::kDiskDirectory);
  if (path == nullptr) return;
  try {
    check_disk_directory(path);
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
