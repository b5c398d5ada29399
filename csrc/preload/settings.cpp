#include "preload/settings.h"

#include <cstring>
#include <string>

#include "base/error.h"
#include "base/log.h"
#include "base/own_library.h"
#include "base/settings.h"
#include "compat/variables.h"
#include "preload/resolver.h"
#include "store/disk_directory.h"

namespace ebbtide::preload {
namespace {

// The enums have the order of the words in settings.def; a test uses each word.
template <typename Value>
void read_word(Setting setting, Value& value) {
  if (const int index = word_index(setting); index >= 0) value = static_cast<Value>(index);
}

// Checked now, because a pause that is refused for it may come hours later.
void check_backup_folder() {
  try {
    check_disk_directory(disk_directory());
  } catch (const Error& error) {
    if (!set_said(Setting::kDiskDirectory)) log_line(LogLevel::kError, {error.what(), ". Until then no pause works"});
  }
}

// EBBTIDE_* come before the variables of torch_memory_saver.
ThreadPolicy read_program_policy() {
  ThreadPolicy policy;
  if (!is_active()) return policy;
  const compat::Variables& tms = compat::variables();
  policy.tagging = read_switch(Setting::kPauseable, false) || tms.is_enabled ? Tagging::kOn : Tagging::kOff;
  if (tms.is_enabled) policy.backup = static_cast<BackupKind>(tms.backup);
  // Its words are those of the kinds, but that "none" stands last.
  if (const int index = word_index(Setting::kBackup); index >= 0)
    policy.backup = static_cast<BackupKind>((static_cast<size_t>(index) + 1) % kBackupKinds);
  policy.retain = tms.is_enabled && tms.retains && policy.backup != BackupKind::kNone;
  const std::string tag = read_variable(Setting::kTag).value_or("default");
  std::memcpy(policy.tag.data(), tag.c_str(), tag.size() + 1);
  const bool is_disk_of_tms = policy.tagging == Tagging::kOn && tms.backup == static_cast<int>(BackupKind::kDisk);
  if (is_disk_of_tms && variable_text(Setting::kDiskFiles) == nullptr) set_disk_files(DiskFiles::kNamed);
  if (tms.disk_directory != nullptr) set_disk_directory(tms.disk_directory);
  if (policy.tagging == Tagging::kOn && policy.backup == BackupKind::kDisk) check_backup_folder();
  return policy;
}

Settings read_settings() {
  Settings read;
  // A program of torch_memory_saver expects an error where memory is short.
  if (own_library().is_torch_memory_savers()) read.on_shortage = OnShortage::kFail;
  read_word(Setting::kOverflow, read.on_shortage);
  read_word(Setting::kReport, read.report);
  read.tags_all = read_switch(Setting::kPauseableAll, read.tags_all);
  read.program = read_program_policy();
  say_malformed_variables();
  return read;
}

}  // namespace

const Settings& settings() {
  static const Settings* const instance = new Settings(read_settings());
  return *instance;
}

}  // namespace ebbtide::preload

ebbtide::ThreadPolicy ebbtide::program_policy() { return preload::settings().program; }
