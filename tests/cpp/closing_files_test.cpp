// Files of backups that nobody wants: closed in the background, and waited for where what they hold is missing.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "base/error.h"
#include "store/closing_files.h"
#include "store_fixture.h"

namespace ebbtide::testing {
namespace {

constexpr size_t kSize = 2 * kMiB;

// What the calls below do instead of the system's.
std::atomic<bool> is_close_slow{false};
std::atomic<int> closes{0};              // counts
std::atomic<int> closes_before_room{0};  // until there were so many, the disk is full

int slow_close(int file) {
  while (is_close_slow) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ++closes;
  return ::close(file);
}
int full_fallocate(int file, int mode, off_t offset, off_t size_bytes) {
  if (mode != 0 || closes >= closes_before_room) return ::fallocate(file, mode, offset, size_bytes);
  is_close_slow = false;  // from now on
  errno = ENOSPC;
  return -1;
}
const FileCalls& slow_calls() {
  static const FileCalls calls = [] {
    FileCalls slow = kSystemFileCalls;
    slow.fallocate = full_fallocate;
    slow.close = slow_close;
    return slow;
  }();
  return calls;
}

class ClosingFilesTest : public ::testing::Test {
 protected:
  ClosingFilesTest() {
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

TEST_F(ClosingFilesTest, NobodyWaitsForThem) {
  is_close_slow = true;
  store_.open(kSize).reset();
  store_.open(kSize).reset();
  EXPECT_EQ(closes, 0);
  is_close_slow = false;
  EXPECT_TRUE(wait_until_closed());
  EXPECT_EQ(closes, 2);
  EXPECT_FALSE(wait_until_closed()) << "nothing is left";
}

TEST_F(ClosingFilesTest, AFullDiskIsAskedAgainWhenTheyHaveGone) {
  auto going = store_.open(kSize);
  const auto staying = store_.open(kSize);
  const std::vector<std::byte> content = random_bytes(kSize, 1);
  staying->discard(0, kSize);
  is_close_slow = true;
  going.reset();
  closes_before_room = 2;  // with the file that it is asked for first
  going = store_.open(kSize);
  EXPECT_EQ(closes, 2);
  is_close_slow = true;
  going.reset();
  closes_before_room = 3;
  staying->reclaim(0, kSize);
  EXPECT_EQ(closes, 3);
  staying->write(0, content.data(), kSize);
  EXPECT_EQ(read_all(*staying, kSize), content);
}

TEST_F(ClosingFilesTest, AFullDiskIsAskedOnceWhereNothingGoes) {
  closes_before_room = 100;
  EXPECT_THROW(store_.open(kSize), StoreError);
  EXPECT_EQ(closes, 1) << "the file that was refused, at once";
  EXPECT_FALSE(wait_until_closed());
}

// It has no thread that would.
TEST_F(ClosingFilesTest, TheChildOfAForkClosesAtOnce) {
  store_.open(kSize).reset();
  const pid_t child = ::fork();
  if (child == 0) {
    const int before = closes;
    close_later(::open("/dev/null", O_RDONLY | O_CLOEXEC), slow_close);
    ::_exit(closes == before + 1 && !wait_until_closed() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace ebbtide::testing
