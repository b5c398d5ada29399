#include "preload/settings.h"

#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/settings.h"
#include "store/disk_directory.h"

namespace ebbtide::preload {
namespace {

template <typename Value>
using Word = std::pair<std::string_view, Value>;

// The words of settings.def; a test uses each of them.
template <typename Value, size_t kCount>
void read_word(Setting setting, const Word<Value> (&words)[kCount], Value& value) {
  const auto text = read_variable(setting);
  for (const auto& [word, meaning] : words) {
    if (text && word == *text) value = meaning;
  }
}

constexpr Word<OnShortage> kOverflowWords[] = {{"split", OnShortage::kSplit},
                                               {"whole", OnShortage::kWhole},
                                               {"managed", OnShortage::kManaged},
                                               {"none", OnShortage::kFail}};
constexpr Word<policy::Report> kReportWords[] = {
    {"device", policy::Report::kDevice}, {"free", policy::Report::kFree}, {"total", policy::Report::kTotal}};
constexpr Word<BackupKind> kBackupWords[] = {{"ram", BackupKind::kRam},
                                             {"pinned", BackupKind::kPinned},
                                             {"disk", BackupKind::kDisk},
                                             {"none", BackupKind::kNone}};

// Checked now, because a pause that is refused for it may come hours later.
void check_backup_folder() {
  try {
    check_disk_directory(disk_directory());
  } catch (const Error& error) {
    log_line(LogLevel::kError, {error.what(), ". Until then no pause works"});
  }
}

Settings read_settings() {
  Settings read;
  read_word(Setting::kOverflow, kOverflowWords, read.on_shortage);
  read_word(Setting::kReport, kReportWords, read.report);
  read_word(Setting::kBackup, kBackupWords, read.backup);
  read.is_pauseable = read_switch(Setting::kPauseable, read.is_pauseable);
  read.tag = read_variable(Setting::kTag).value_or(read.tag);
  say_malformed_variables();
  if (read.is_pauseable && read.backup == BackupKind::kDisk) check_backup_folder();
  return read;
}

}  // namespace

const Settings& settings() {
  static const Settings* const instance = new Settings(read_settings());
  return *instance;
}

}  // namespace ebbtide::preload
