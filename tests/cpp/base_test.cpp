// Sizes as text, UTF-8, and the lines on stderr.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "base/log.h"
#include "base/log_throttle.h"
#include "base/text.h"

namespace ebbtide {
namespace {

std::optional<uint64_t> parse_bytes(std::string_view text) {
  const ParsedSize parsed = parse_size(text);
  return parsed.problem == SizeProblem::kNone ? std::optional(parsed.bytes) : std::nullopt;
}

TEST(Bytes, SizesAreReadInEveryUnit) {
  EXPECT_EQ(parse_bytes("0"), 0u);
  EXPECT_EQ(parse_bytes("123"), 123u);
  EXPECT_EQ(parse_bytes("1b"), 1u);
  EXPECT_EQ(parse_bytes("2KiB"), 2 * kKiB);
  EXPECT_EQ(parse_bytes("3MiB"), 3 * kMiB);
  EXPECT_EQ(parse_bytes("4GiB"), 4 * kGiB);
  EXPECT_EQ(parse_bytes("2TiB"), 2048 * kGiB);
  EXPECT_EQ(parse_bytes("5kB"), 5'000u);
  EXPECT_EQ(parse_bytes("6MB"), 6'000'000u);
  EXPECT_EQ(parse_bytes("7GB"), 7'000'000'000u);
  EXPECT_EQ(parse_bytes("1.5 MiB"), 3 * kMiB / 2);
  EXPECT_EQ(parse_bytes("  16gib  "), 16 * kGiB);
  EXPECT_EQ(parse_bytes("9223372036854774784"), 9223372036854774784u);
}

TEST(Bytes, WhatIsNoSizeIsNone) {
  for (const char* text : {"", " ", "GiB", "-1", "1.2.3", "1 XiB", "1Gi", "1Gib2", "lots", "1e9", ".", "16 EiB", "1x",
                           "0x10", "9999999999GiB", "1 i b", "1 bb"}) {
    EXPECT_EQ(parse_bytes(text), std::nullopt) << text;
  }
}

TEST(Bytes, SizesAreWrittenInTheLargestUnitThatTheyFill) {
  EXPECT_EQ(format_bytes(1), "1 bytes");
  EXPECT_EQ(format_bytes(kKiB - 1), "1023 bytes");
  EXPECT_EQ(format_bytes(kMiB), "1 MiB");
  EXPECT_EQ(format_bytes(kMiB - kKiB), "1023 KiB");
  EXPECT_EQ(format_bytes(kGiB + kGiB / 4), "1.2 GiB");
  EXPECT_EQ(format_bytes(1024 * kGiB), "1 TiB");
  EXPECT_EQ(format_bytes(1024 * 1024 * kGiB), "1 PiB");
  EXPECT_EQ(format_bytes(UINT64_C(1) << 63), "8 EiB");
}

TEST(Text, Utf8IsToldFromOtherBytes) {
  for (const char* text :
       {"", "a", "\x7f", "\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF", "\xEE\x80\x80", "\xEF\xBF\xBF",
        "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF", "\xF1\x80\x80\x80", "a\xC3\xBC\xE2\x9C\x93z"}) {
    EXPECT_TRUE(is_utf8(text)) << text;
  }
  for (const char* text : {"\x80", "\xBF", "\xC0\x80", "\xC1\xBF", "\xC2", "\xC2\x41", "\xC2\xC0", "\xE0\x9F\xBF",
                           "\xE0\xA0", "\xE1\x80", "\xE1\x80\x41", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF", "\xF0\x90\x80",
                           "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "a\xC3"}) {
    EXPECT_FALSE(is_utf8(text)) << testing::PrintToString(std::string(text));
  }
}

TEST(Text, ACutIsNeverInsideACharacter) {
  const std::string text = "a\xC3\xBC\xE2\x9C\x93";  // 1, 2 and 3 bytes long
  EXPECT_EQ(cut_utf8(text, 0), "");
  EXPECT_EQ(cut_utf8(text, 1), "a");
  EXPECT_EQ(cut_utf8(text, 2), "a");
  EXPECT_EQ(cut_utf8(text, 3), "a\xC3\xBC");
  EXPECT_EQ(cut_utf8(text, 5), "a\xC3\xBC");
  EXPECT_EQ(cut_utf8(text, 6), text);
  EXPECT_EQ(cut_utf8(text, 7), text);
}

// The level is read once, so each of these tests runs in its own process.
std::string logged(const char* level) {
  if (level != nullptr) ::setenv("EBBTIDE_LOG", level, 1);
  if (level == nullptr) ::unsetenv("EBBTIDE_LOG");
  ::testing::internal::CaptureStderr();
  log_line(LogLevel::kError, {"one", " error"});
  log_line(LogLevel::kWarning, {"a warning"});
  log_line(LogLevel::kInfo, {"some info"});
  return ::testing::internal::GetCapturedStderr();
}

TEST(Log, ErrorsAlone) { EXPECT_EQ(logged("error"), "ebbtide: one error\n"); }
TEST(Log, WarningsAsWellWhereNothingIsSaid) { EXPECT_EQ(logged(nullptr), "ebbtide: one error\nebbtide: a warning\n"); }
TEST(Log, WarningsAsWell) { EXPECT_EQ(logged("warning"), "ebbtide: one error\nebbtide: a warning\n"); }
TEST(Log, All) { EXPECT_EQ(logged("info"), "ebbtide: one error\nebbtide: a warning\nebbtide: some info\n"); }

TEST(Log, ALongLineIsCutAndEnds) {
  ::setenv("EBBTIDE_LOG", "error", 1);
  const std::string piece(700, 'x');
  ::testing::internal::CaptureStderr();
  log_line(LogLevel::kError, {piece, piece, piece});
  const std::string line = ::testing::internal::GetCapturedStderr();
  EXPECT_GE(line.size(), 1000u);
  EXPECT_LE(line.size(), 1024u);
  EXPECT_EQ(line.substr(0, 9), "ebbtide: ");
  EXPECT_EQ(line.find('\n'), line.size() - 1);
  EXPECT_EQ(line.find_first_not_of('x', 9), line.size() - 1);
}

// A daemon's stderr may be a pipe whose reader is gone. For that the system ends a program which wrote itself, and ours
// did not.
TEST(Log, AClosedReaderEndsNoProgram) {
  ::setenv("EBBTIDE_LOG", "error", 1);
  const auto is_pending = [] {
    sigset_t pending;
    return ::sigpending(&pending) == 0 && ::sigismember(&pending, SIGPIPE) == 1;
  };
  const auto is_blocked = [] {
    sigset_t mask;
    return ::pthread_sigmask(SIG_BLOCK, nullptr, &mask) == 0 && ::sigismember(&mask, SIGPIPE) == 1;
  };
  ::signal(SIGPIPE, SIG_DFL);
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ::close(ends[0]);
  const int kept = ::dup(STDERR_FILENO);
  ::dup2(ends[1], STDERR_FILENO);
  errno = 7;
  log_line(LogLevel::kError, {"nobody reads this"});
  const int error = errno;
  const bool was_blocked = is_blocked();
  sigset_t pipe_signal;
  ::sigemptyset(&pipe_signal);
  ::sigaddset(&pipe_signal, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &pipe_signal, nullptr);
  log_line(LogLevel::kError, {"nor this"});
  const bool was_left = is_pending();
  ::raise(SIGPIPE);
  errno = 7;
  log_line(LogLevel::kError, {"nor this, while the program puts a signal of its own off"});
  const int later_error = errno;
  const bool is_kept = is_pending();
  ::signal(SIGPIPE, SIG_IGN);  // drops it
  ::dup2(kept, STDERR_FILENO);
  EXPECT_EQ(error, 7);
  EXPECT_EQ(later_error, 7);
  EXPECT_FALSE(was_blocked);
  EXPECT_FALSE(was_left) << "it would end the program as soon as that unblocks it";
  EXPECT_TRUE(is_kept);
}

TEST(Log, AFileThatMayNotGrowEndsNoProgram) {
  ::setenv("EBBTIDE_LOG", "error", 1);
  ::signal(SIGXFSZ, SIG_DFL);
  std::FILE* const file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  const rlimit none = {0, RLIM_INFINITY};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &none), 0);
  const int kept = ::dup(STDERR_FILENO);
  ::dup2(::fileno(file), STDERR_FILENO);
  log_line(LogLevel::kError, {"there is no room for this"});
  ::dup2(kept, STDERR_FILENO);
  const rlimit all = {RLIM_INFINITY, RLIM_INFINITY};
  ::setrlimit(RLIMIT_FSIZE, &all);
  EXPECT_EQ(std::fseek(file, 0, SEEK_END), 0);
  EXPECT_EQ(std::ftell(file), 0);
  std::fclose(file);
}

TEST(LogThrottle, TheFirstEightAreSaidThenEveryPowerOfTwo) {
  LogThrottle throttle;
  std::string said;
  for (int count = 1; count <= 70; ++count) {
    if (throttle.allows()) said += std::to_string(count) + " ";
  }
  EXPECT_EQ(said, "1 2 3 4 5 6 7 8 16 32 64 ");
}

}  // namespace
}  // namespace ebbtide
