#include "base/log.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "base/quiet_write.h"
#include "base/settings.h"

namespace ebbtide {
namespace {

// say_malformed_variables() reports a malformed value, as for every other variable.
LogLevel level_from_environment() noexcept {
  const int index = word_index(Setting::kLog);
  return index < 0 ? LogLevel::kWarning : static_cast<LogLevel>(index);
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
  const int error = errno;
  write_quietly([&] { return ::write(STDERR_FILENO, line, length); });
  errno = error;
}

}  // namespace ebbtide
