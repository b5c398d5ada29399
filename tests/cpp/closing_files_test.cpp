// Files of backups that are no longer used: they are closed in the background. An operation that needs their space
// waits for that.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "base/error.h"
#include "base/fork.h"
#include "store/closing_files.h"
#include "store_fixture.h"

namespace ebbtide::testing {
namespace {

constexpr size_t kSize = 2 * kMiB;

// The behaviour of the calls below, which replace the system's.
std::atomic<bool> is_close_slow{false};
std::atomic<bool> must_close_meanwhile{false};  // a full disk refuses only after everything has been closed
std::atomic<int> closes{0};                     // a count
std::atomic<int> closes_before_room{0};         // the disk is full until this many files are closed

std::atomic<int> last_file{-1};

int slow_close(int file) {
  while (is_close_slow) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ++closes;
  return ::close(file);
}
int full_fallocate(int file, int mode, off_t offset, off_t size_bytes) {
  last_file = file;
  if (mode != 0 || closes >= closes_before_room) return ::fallocate(file, mode, offset, size_bytes);
  is_close_slow = false;  // from now on
  if (must_close_meanwhile) wait_until_closed();
  errno = ENOSPC;
  return -1;
}
ssize_t full_pwrite(int file, const void* bytes, size_t size_bytes, off_t offset) {
  const bool is_full = closes < closes_before_room;
  return is_full ? full_fallocate(file, 0, 0, 0) : ::pwrite(file, bytes, size_bytes, offset);
}
const FileCalls& slow_calls() {
  static const FileCalls calls = [] {
    FileCalls slow = kSystemFileCalls;
    slow.fallocate = full_fallocate;
    slow.pwrite = full_pwrite;
    slow.close = slow_close;
    return slow;
  }();
  return calls;
}

class ClosingFilesTest : public ::testing::Test {
 protected:
  ClosingFilesTest() {
    wait_until_closed();  // files of other tests
    must_close_meanwhile = false;
    closes = 0;
    closes_before_room = 0;
  }
  ~ClosingFilesTest() override {
    is_close_slow = false;
    wait_until_closed();
  }

  DiskDirectory directory_;
  DiskStore store_{slow_calls()};
};

TEST_F(ClosingFilesTest, NoOperationWaitsForThem) {
  is_close_slow = true;
  store_.open(kSize).reset();
  store_.open(kSize).reset();
  EXPECT_EQ(closes, 0);
  is_close_slow = false;
  wait_until_closed();
  EXPECT_EQ(closes, 2);
}

TEST_F(ClosingFilesTest, AFullDiskIsAskedAgainWhenTheyHaveGone) {
  for (const bool is_soon : {false, true}) {
    wait_until_closed();
    must_close_meanwhile = is_soon;
    closes = closes_before_room = 0;
    auto going = store_.open(kSize);
    const auto staying = store_.open(kSize);
    const std::vector<std::byte> content = random_bytes(kSize, 1);
    staying->discard(0, kSize);
    is_close_slow = true;
    going.reset();
    closes_before_room = is_soon ? 1 : 2;  // the refused file itself counts as one
    going = store_.open(kSize);
    EXPECT_EQ(closes, 2);
    is_close_slow = true;
    going.reset();
    closes_before_room = 3;
    staying->reclaim(0, kSize);
    EXPECT_EQ(closes, 3);
    // A disk on which no space can be claimed refuses at a write.
    going = store_.open(kSize);
    is_close_slow = true;
    going.reset();
    closes_before_room = 4;
    write_all(*staying, content);
    EXPECT_EQ(closes, 4);
    EXPECT_EQ(read_all(*staying, kSize), content);
  }
}

TEST_F(ClosingFilesTest, AFullDiskIsAskedOnceWhereNothingGoes) {
  closes_before_room = 100;
  EXPECT_THROW(store_.open(kSize), StoreError);
  EXPECT_EQ(closes, 1) << "the file that was refused, at once";
}

// Another process, such as a forked child, may have a descriptor. A file that it may view keeps its content.
TEST_F(ClosingFilesTest, TheirSpaceGoesBackForEachOwner) {
  for (const bool is_looked_at : {false, true}) {
    auto backup = store_.open(kSize);
    const std::vector<std::byte> content = random_bytes(kSize, 2);
    write_all(*backup, content);
    if (is_looked_at) backup->view();
    const int descriptor = ::dup(last_file);
    backup.reset();
    wait_until_closed();
    struct stat info{};
    EXPECT_EQ(::fstat(descriptor, &info), 0);
    EXPECT_EQ(info.st_blocks, 0);
    ::close(descriptor);
  }
}

// The child has no thread that closes files.
TEST_F(ClosingFilesTest, TheChildOfAForkHasClosedThem) {
  store_.open(kSize).reset();
  PrivateFiles& files = PrivateFiles::instance();
  const auto open_null = [] { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); };
  const int file = files.open(open_null);
  ASSERT_GE(file, 0);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::fcntl(file, F_GETFD) >= 0) ::_exit(1);
    if (::dup2(0, file) != file) ::_exit(2);  // from now on the number is another file's
    close_later(file, kSize, slow_calls());
    wait_until_closed();
    files.close(file, [&] { ::close(file); });
    ::_exit(files_closed() == 0 && ::fcntl(file, F_GETFD) >= 0 ? 0 : 3);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_GE(::fcntl(file, F_GETFD), 0);
  files.close(file, [&] { ::close(file); });
  EXPECT_LT(::fcntl(file, F_GETFD), 0);
}

}  // namespace
}  // namespace ebbtide::testing
