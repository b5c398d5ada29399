#include "base/log.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <string_view>

#include "base/settings.h"

namespace ebbtide {
namespace {

// say_malformed_variables() reports a malformed value, as for every other variable.
LogLevel level_from_environment() noexcept {
  const int index = word_index(Setting::kLog);
  return index < 0 ? LogLevel::kWarning : static_cast<LogLevel>(index);
}

// As write(), but where the pipe has no reader or the file may not grow, no signal ends the process: the program did
// not write this. What is pending already, the program has blocked and will see once in any case.
void write_quietly(const char* line, size_t length) noexcept {
  const int error = errno;
  sigset_t ours;
  sigset_t before;
  sigset_t pending;
  ::sigemptyset(&ours);
  ::sigpending(&pending);
  for (const int signal : {SIGPIPE, SIGXFSZ}) {
    if (::sigismember(&pending, signal) == 0) ::sigaddset(&ours, signal);
  }
  if (::pthread_sigmask(SIG_BLOCK, &ours, &before) == 0) {
    if (::write(STDERR_FILENO, line, length) < 0 && (errno == EPIPE || errno == EFBIG)) {
      constexpr timespec kNow = {0, 0};
      while (::sigtimedwait(&ours, nullptr, &kNow) < 0 && errno == EINTR) {
      }
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  errno = error;
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
  write_quietly(line, length);
}

}  // namespace ebbtide
