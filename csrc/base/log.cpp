#include "base/log.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace ebbtide {
namespace {

LogLevel level_from_environment() {
  const char* text = std::getenv("EBBTIDE_LOG");
  const std::string_view level = text == nullptr ? "" : text;
  if (level == "error") return LogLevel::kError;
  if (level == "info") return LogLevel::kInfo;
  return LogLevel::kWarning;
}

}  // namespace

void log_line(LogLevel level, std::initializer_list<std::string_view> pieces) noexcept {
  static const LogLevel limit = level_from_environment();
  if (level > limit) return;
  char line[1024];
  size_t length = 0;
  const auto append = [&](std::string_view piece) {
    const size_t part = std::min(piece.size(), sizeof line - 1 - length);
    std::memcpy(line + length, piece.data(), part);
    length += part;
  };
  append("ebbtide: ");
  for (const std::string_view piece : pieces) append(piece);
  line[length++] = '\n';
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line, length);
}

}  // namespace ebbtide
