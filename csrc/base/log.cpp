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

// As write(), but without a reader it does not end the process by SIGPIPE: the program did not write this.
void write_quietly(const char* line, size_t length) noexcept {
  sigset_t pipe_signal;
  sigset_t before;
  sigset_t pending;
  ::sigemptyset(&pipe_signal);
  ::sigaddset(&pipe_signal, SIGPIPE);
  ::sigpending(&pending);
  if (::sigismember(&pending, SIGPIPE) == 1 || ::pthread_sigmask(SIG_BLOCK, &pipe_signal, &before) != 0) {
    // The program has blocked it, and knows of one already.
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line, length);
    return;
  }
  const int error = errno;
  if (::write(STDERR_FILENO, line, length) < 0 && errno == EPIPE) {
    constexpr timespec kNow = {0, 0};
    while (::sigtimedwait(&pipe_signal, nullptr, &kNow) < 0 && errno == EINTR) {
    }
  }
  errno = error;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
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
