// The disk store: the location of its files, and the refusals of a file system, none of which loses a byte.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <functional>

#include "base/error.h"
#include "store/closing_files.h"
#include "store_fixture.h"

namespace ebbtide::testing {
namespace {

constexpr size_t kSize = 2 * kMiB;

// The behaviour of the calls below, which replace the system's. 0 and empty mean no fault.
struct Faults {
  std::atomic<int> open_error{0};
  std::atomic<int> direct_error{0};  // when O_DIRECT is turned on
  std::atomic<int> fallocate_error{0};
  std::atomic<int> write_error{0};
  std::atomic<int> writes_before_error{0};
  std::atomic<int> read_error{0};
  std::atomic<int> write_back_error{0};
  std::atomic<size_t> most_bytes{SIZE_MAX};  // a request reports at most this many bytes as moved
  std::atomic<int> interrupts{0};            // this many requests are interrupted first
  std::atomic<int> writes_back{0};           // a count
  std::atomic<int> punches{0};
  std::atomic<uint64_t> claimed_bytes{0};  // the bytes that the disk gave to the last file on request
  std::atomic<int> writes_before_claim{0};
};
Faults* faults = nullptr;

int fail(int error) {
  errno = error;
  return -1;
}
bool is_interrupted() { return faults->interrupts > 0 && faults->interrupts.fetch_sub(1) > 0; }

int fault_open(const char* path, int flags, mode_t mode) {
  return faults->open_error != 0 ? fail(faults->open_error) : ::open(path, flags, mode);
}
int fault_set_flags(int file, int flags) {
  if (faults->direct_error != 0 && (flags & O_DIRECT) != 0) return fail(faults->direct_error);
  return ::fcntl(file, F_SETFL, flags);
}
int fault_fallocate(int file, int mode, off_t offset, off_t size_bytes) {
  if (is_interrupted()) return fail(EINTR);
  if (mode != 0) ++faults->punches;
  if (faults->fallocate_error != 0) return fail(faults->fallocate_error);
  const int result = ::fallocate(file, mode, offset, size_bytes);
  struct stat info{};
  if (mode == 0 && ::fstat(file, &info) == 0) faults->claimed_bytes = static_cast<uint64_t>(info.st_blocks) * 512;
  return result;
}
ssize_t fault_pwrite(int file, const void* bytes, size_t size_bytes, off_t offset) {
  if (faults->claimed_bytes == 0) ++faults->writes_before_claim;
  if (is_interrupted()) return fail(EINTR);
  if (faults->write_error != 0 && faults->writes_before_error.fetch_sub(1) <= 0) return fail(faults->write_error);
  const ssize_t count = ::pwrite(file, bytes, size_bytes, offset);
  return std::min(count, static_cast<ssize_t>(std::min<size_t>(faults->most_bytes, SSIZE_MAX)));
}
ssize_t fault_pread(int file, void* bytes, size_t size_bytes, off_t offset) {
  if (is_interrupted()) return fail(EINTR);
  if (faults->read_error != 0) return fail(faults->read_error);
  const ssize_t count = ::pread(file, bytes, size_bytes, offset);
  return std::min(count, static_cast<ssize_t>(std::min<size_t>(faults->most_bytes, SSIZE_MAX)));
}
int fault_write_back(int file, off_t offset, off_t size_bytes) {
  ++faults->writes_back;
  return faults->write_back_error != 0 ? fail(faults->write_back_error)
                                       : kSystemFileCalls.write_back(file, offset, size_bytes);
}
constexpr FileCalls kFaultyCalls = {fault_open,  fault_set_flags,  fault_fallocate, fault_pwrite,
                                    fault_pread, fault_write_back, ::close};

class DiskStoreTest : public ::testing::Test {
 protected:
  DiskStoreTest() { faults = &faults_; }
  ~DiskStoreTest() override {
    wait_until_closed();  // those of these calls
    faults = nullptr;
  }

  // The error that act throws. It must be a StoreError that names the directory and an alternative.
  StoreError refusal(const std::function<void()>& act) {
    try {
      act();
    } catch (const StoreError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find(disk_directory()), std::string::npos) << text;
      EXPECT_NE(text.find("configure another directory as disk_directory"), std::string::npos) << text;
      EXPECT_NE(text.find("keep backups in RAM"), std::string::npos) << text;
      EXPECT_EQ(error.cause, Cause::kDiskDirectory);
      EXPECT_TRUE(directory_.is_empty());
      return error;
    }
    ADD_FAILURE() << "nothing was thrown";
    return StoreError("", {});
  }
  static bool has_text(const StoreError& error, const std::string& text) {
    return std::string(error.what()).find(text) != std::string::npos;
  }
  static void expect_round_trip(Backup& backup) {
    const std::vector<std::byte> content = random_bytes(kSize, 1);
    write_at(backup, 0, content.data(), kSize / 2);
    write_at(backup, kSize / 2, content.data() + kSize / 2, kSize / 2);
    EXPECT_EQ(read_all(backup, kSize), content);
    EXPECT_EQ(std::memcmp(backup.view(), content.data(), kSize), 0);
  }

  Faults faults_;
  DiskDirectory directory_;
  DiskStore store_{kFaultyCalls};
};

TEST_F(DiskStoreTest, NoNameIsLeftWhileItIsOpen) {
  for (const int error : {0, EOPNOTSUPP, EISDIR, EINVAL}) {  // all but 0: file systems without nameless files
    faults_.open_error = error;
    const auto backup = store_.open(kSize);
    EXPECT_TRUE(directory_.is_empty());
    expect_round_trip(*backup);
    EXPECT_TRUE(directory_.is_empty());
  }
}

TEST_F(DiskStoreTest, ThePageCacheIsPassedByWhereTheFileSystemCan) {
  const std::string name = directory_.path() + "/probe";
  const int probe = ::open(name.c_str(), O_RDWR | O_CREAT | O_DIRECT, 0600);
  EXPECT_EQ(BackupFile::create({directory_.path()}, kSize, kSystemFileCalls).is_direct(), probe >= 0);
  if (probe >= 0) ::close(probe);
}

TEST_F(DiskStoreTest, SpaceIsClaimedBeforeAnythingIsWritten) {
  const auto backup = store_.open(kSize);
  EXPECT_EQ(faults_.writes_before_claim, 0);
  EXPECT_GE(faults_.claimed_bytes, kSize);
}

// A file system that accepts O_DIRECT and refuses each such request is treated as one without it.
TEST_F(DiskStoreTest, WithoutDirectRequestsBytesAreOnTheDiskWhenWriteReturns) {
  for (const bool is_refused_late : {false, true}) {
    faults_.direct_error = is_refused_late ? 0 : EINVAL;
    faults_.write_error = is_refused_late ? EINVAL : 0;
    const auto backup = store_.open(kSize);
    faults_.write_error = 0;
    faults_.writes_back = 0;
    expect_round_trip(*backup);
    EXPECT_EQ(faults_.writes_back, 2);
    faults_.write_back_error = EIO;
    EXPECT_TRUE(has_text(refusal([&] { write_all(*backup, random_bytes(4096, 1)); }), "Input/output error"));
    faults_.write_back_error = 0;
  }
}

TEST_F(DiskStoreTest, ShortAndInterruptedRequestsGoOn) {
  for (const int direct_error : {0, EINVAL}) {
    faults_.direct_error = direct_error;
    faults_.interrupts = 4;
    const auto backup = store_.open(kSize);
    faults_.interrupts = 3;
    faults_.most_bytes = 150001;
    expect_round_trip(*backup);
    faults_.interrupts = 3;
    expect_round_trip(*backup);
    faults_.most_bytes = 0;
    EXPECT_TRUE(has_text(refusal([&] { write_all(*backup, random_bytes(8192, 1)); }), "Input/output error"));
    try {
      read_all(*backup, kSize);
      ADD_FAILURE() << "nothing was read";
    } catch (const StoreError& error) {
      EXPECT_TRUE(has_text(error, "is shorter than the backup")) << error.what();
    }
    faults_.most_bytes = SIZE_MAX;
  }
}

TEST_F(DiskStoreTest, WithoutAClaimTheFreeSpaceDecides) {
  faults_.fallocate_error = EOPNOTSUPP;
  const auto backup = store_.open(kSize);
  expect_round_trip(*backup);
  const StoreError error = refusal([&] { store_.open(1ULL << 50); });
  EXPECT_EQ(error.shortage.requested_bytes, 1ULL << 50);
  EXPECT_GT(error.shortage.free_bytes, 0u);
  EXPECT_LT(error.shortage.free_bytes, 1ULL << 50);
}

TEST_F(DiskStoreTest, AFullDiskIsAStoreErrorWithItsNumbers) {
  for (const int code : {ENOSPC, EDQUOT}) {
    faults_.fallocate_error = code;
    const StoreError error = refusal([&] { store_.open(kSize); });
    EXPECT_EQ(error.shortage.requested_bytes, kSize);
    EXPECT_GT(error.shortage.free_bytes, 0u);
    EXPECT_TRUE(has_text(error, "too little space")) << error.what();
    EXPECT_TRUE(has_text(error, "2 MiB wanted")) << error.what();
  }
}

TEST_F(DiskStoreTest, AClaimThatFailsOtherwiseSaysHow) {
  faults_.fallocate_error = EIO;
  EXPECT_TRUE(has_text(refusal([&] { store_.open(kSize); }), "fallocate failed"));
}

TEST_F(DiskStoreTest, AWriteThatFailsMidwayLeavesWhatWasWritten) {
  for (const int code : {ENOSPC, EIO}) {
    const auto backup = store_.open(kSize);
    const std::vector<std::byte> before = random_bytes(kSize, 2);
    const std::vector<std::byte> after = random_bytes(kSize, 3);
    write_all(*backup, before);
    faults_.writes_before_error = 1;
    faults_.write_error = code;
    faults_.most_bytes = kMiB;  // so this takes two requests
    refusal([&] { write_at(*backup, 4096, after.data(), kSize - 4096); });
    faults_.write_error = 0;
    faults_.most_bytes = SIZE_MAX;
    EXPECT_EQ(std::memcmp(read_at(*backup, 0, 4096).data(), before.data(), 4096), 0);
    expect_round_trip(*backup);
  }
}

TEST_F(DiskStoreTest, AReadThatFailsIsAStoreError) {
  const auto backup = store_.open(kSize);
  expect_round_trip(*backup);
  faults_.read_error = EIO;
  EXPECT_TRUE(has_text(refusal([&] { read_all(*backup, kSize); }), "pread failed"));
  faults_.read_error = 0;
  expect_round_trip(*backup);
}

// A limit of the process, which the system applies to each write as a full disk would.
TEST_F(DiskStoreTest, ALimitOnFilesIsAStoreErrorAndNoSignal) {
  const auto open_before = store_.open(kSize);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit tight = {kMiB, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &tight), 0);
  const StoreError at_open = refusal([&] { store_.open(kSize); });
  // Lowered while a backup is open. Nothing is written then, because a write would raise a signal whose default action
  // ends the process.
  const std::vector<std::byte> content = random_bytes(kSize, 4);
  const StoreError midway = refusal([&] { write_all(*open_before, content); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  for (const StoreError& error : {at_open, midway}) {
    EXPECT_EQ(error.shortage.requested_bytes, kSize);
    EXPECT_EQ(error.shortage.limit_bytes, kMiB);
    EXPECT_TRUE(has_text(error, "ulimit -f")) << error.what();
  }
  write_all(*open_before, content);
  EXPECT_EQ(read_all(*open_before, kSize), content);
  expect_round_trip(*open_before);
}

TEST_F(DiskStoreTest, ADirectoryThatTakesNoFileIsAStoreErrorThatSaysWhy) {
  const std::string file = directory_.path() + "-file";
  std::ofstream(file) << "a file";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {directory_.path() + "/missing", "make that directory"}, {file, "make that directory"}, {"/proc/self", "Either"}};
  for (const auto& [path, advice] : cases) {
    set_disk_directory(path);
    const StoreError error = refusal([&] { store_.open(kSize); });
    EXPECT_EQ(error.shortage.requested_bytes, kSize);
    EXPECT_TRUE(has_text(error, advice)) << error.what();
  }
  ::unlink(file.c_str());
  set_disk_directory(directory_.path());
  for (const auto& [code, advice] : {std::pair{EROFS, "look at that directory"},
                                     {EACCES, "permissions"},
                                     {EMFILE, "ulimit -n"},
                                     {ENFILE, "ulimit -n"}}) {
    faults_.open_error = code;
    EXPECT_TRUE(has_text(refusal([&] { store_.open(kSize); }), advice)) << code;
  }
}

TEST_F(DiskStoreTest, ANameThatIsNoTextIsNotShown) {
  set_disk_directory("/nowhere/\xff\xfe");
  try {
    store_.open(kSize);
    FAIL() << "nothing was thrown";
  } catch (const StoreError& error) {
    EXPECT_TRUE(has_text(error, "no UTF-8"));
    EXPECT_FALSE(has_text(error, "\xff"));
  }
}

TEST_F(DiskStoreTest, ADiskThatIsNearlyFullIsAWarningWhereItIsChosen) {
  const DiskPlace place{disk_directory()};
  ::testing::internal::CaptureStderr();
  for (const uint64_t least_bytes : {uint64_t{1}, kUnlimited}) BackupFile::check_directory(place, least_bytes);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(said.find("the disk of '" + disk_directory() + "' has "), std::string("ebbtide: ").size()) << said;
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1);
  EXPECT_NE(said.find("free: disk backups there need more"), std::string::npos) << said;
  EXPECT_TRUE(directory_.is_empty());
}

TEST_F(DiskStoreTest, MemoryIsNoDisk) {
  EXPECT_TRUE(is_memory_file_system(0x01021994));
  EXPECT_TRUE(is_memory_file_system(0x858458f6));
  EXPECT_FALSE(is_memory_file_system(0xef53));      // ext4
  EXPECT_FALSE(is_memory_file_system(0x794c7630));  // overlayfs
  struct statfs info{};
  if (::statfs("/dev/shm", &info) != 0 || !is_memory_file_system(static_cast<uint64_t>(info.f_type))) return;
  set_disk_directory("/dev/shm");
  EXPECT_TRUE(has_text(refusal([&] { store_.open(kSize); }), "RAM"));
}

TEST_F(DiskStoreTest, DiscardedBlocksAreGivenBackAndAPunchThatFailsIsNoMatter) {
  const auto backup = store_.open(kSize);
  const std::vector<std::byte> content = random_bytes(kSize, 5);
  write_all(*backup, content);
  faults_.fallocate_error = EOPNOTSUPP;
  backup->discard(0, kSize);
  EXPECT_EQ(faults_.punches, 1);
  EXPECT_EQ(read_all(*backup, kSize), content);
  faults_.fallocate_error = 0;
  backup->discard(100, 4000);
  EXPECT_EQ(faults_.punches, 1) << "no whole block";
  backup->discard(100, 3 * 4096);
  EXPECT_EQ(faults_.punches, 2);
  std::vector<std::byte> expected = content;
  std::fill_n(expected.begin() + 4096, 2 * 4096, std::byte{0});
  EXPECT_EQ(read_all(*backup, kSize), expected);
  EXPECT_EQ(std::memcmp(backup->view(), expected.data(), kSize), 0);
}

TEST_F(DiskStoreTest, WhatWasGivenBackIsClaimedAgain) {
  const auto backup = store_.open(kSize);
  backup->discard(0, kSize);
  for (const int code : {ENOSPC, EDQUOT}) {
    faults_.fallocate_error = code;
    EXPECT_TRUE(has_text(refusal([&] { backup->reclaim(0, kSize); }), "too little space"));
  }
  faults_.fallocate_error = EOPNOTSUPP;
  backup->reclaim(0, kSize);  // where space cannot be claimed, a full disk shows at the write
  faults_.fallocate_error = 0;
  faults_.interrupts = 2;
  backup->reclaim(0, kSize / 2);
  EXPECT_GE(faults_.claimed_bytes, kSize / 2);
  backup->reclaim(0, kSize);
  EXPECT_GE(faults_.claimed_bytes, kSize);
  expect_round_trip(*backup);
  const std::vector<std::byte> content = read_all(*backup, kSize);
  backup->reclaim(0, kSize);
  EXPECT_EQ(read_all(*backup, kSize), content) << "the content stays";
}

TEST_F(DiskStoreTest, AViewThatTheSystemRefusesIsAStoreErrorAndTheNextTryWorks) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  const auto backup = store_.open(512 * kMiB);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  long pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlimit tight = {static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE)) + 64 * kMiB, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &tight), 0);
  const StoreError error = refusal([&] { backup->view(); });
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_TRUE(has_text(error, "mmap failed")) << error.what();
  EXPECT_NE(backup->view(), nullptr);
#endif
}

}  // namespace
}  // namespace ebbtide::testing
