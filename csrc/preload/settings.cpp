#include "preload/settings.h"

#include <cstdlib>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "core/registry.h"

namespace ebbtide::preload {
namespace {

template <typename Value>
using Word = std::pair<std::string_view, Value>;

template <typename Value, size_t kCount>
void read_word(const char* variable, const char* text, const Word<Value> (&words)[kCount], Value& value) {
  if (text == nullptr || *text == '\0') return;
  for (const auto& [word, meaning] : words) {
    if (word == text) {
      value = meaning;
      return;
    }
  }
  log_line(LogLevel::kError, {variable, "=", text, " is unknown; it is ignored"});
}

constexpr Word<OnShortage> kOverflowWords[] = {{"split", OnShortage::kSplit},
                                               {"whole", OnShortage::kWhole},
                                               {"managed", OnShortage::kManaged},
                                               {"none", OnShortage::kFail}};
constexpr Word<policy::Report> kReportWords[] = {
    {"device", policy::Report::kDevice}, {"free", policy::Report::kFree}, {"total", policy::Report::kTotal}};
constexpr Word<bool> kSwitchWords[] = {{"0", false}, {"1", true}};
constexpr Word<BackupKind> kBackupWords[] = {{"ram", BackupKind::kRam},
                                             {"pinned", BackupKind::kPinned},
                                             {"disk", BackupKind::kDisk},
                                             {"none", BackupKind::kNone}};

void read_tag(const char* text, std::string& tag) {
  if (text == nullptr || *text == '\0') return;
  try {
    check_tag_name(text);
    tag = text;
  } catch (const InvalidArgument& error) {
    log_line(LogLevel::kError, {"EBBTIDE_TAG: ", error.what(), "; it is ignored"});
  }
}

Settings read_settings() {
  Settings read;
  read_word("EBBTIDE_OVERFLOW", std::getenv("EBBTIDE_OVERFLOW"), kOverflowWords, read.on_shortage);
  read_word("EBBTIDE_REPORT", std::getenv("EBBTIDE_REPORT"), kReportWords, read.report);
  read_word("EBBTIDE_PAUSEABLE", std::getenv("EBBTIDE_PAUSEABLE"), kSwitchWords, read.is_pauseable);
  read_word("EBBTIDE_BACKUP", std::getenv("EBBTIDE_BACKUP"), kBackupWords, read.backup);
  read_tag(std::getenv("EBBTIDE_TAG"), read.tag);
  return read;
}

}  // namespace

const Settings& settings() {
  static const Settings* const instance = new Settings(read_settings());
  return *instance;
}

}  // namespace ebbtide::preload
