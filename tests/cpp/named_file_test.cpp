// Disk backups whose files have names: when they are there, when they go, and what other processes do with them.
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>

#include "base/error.h"
#include "base/scope_exit.h"
#include "moves_faults.h"
#include "store/closing_files.h"
#include "store_fixture.h"

namespace ebbtide::testing {
namespace {

constexpr size_t kSize = 2 * kMiB;

std::set<std::string> names_in(const std::string& directory) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) names.insert(entry.path().filename());
  return names;
}

// Another process, which runs act and then waits to be killed, or ends as act says.
class Process {
 public:
  explicit Process(const std::function<void()>& act) {
    int ready[2] = {};
    if (::pipe(ready) != 0) throw std::runtime_error("no pipe");
    process_ = ::fork();
    if (process_ == 0) {
      ::close(ready[0]);
      act();
      if (::write(ready[1], "x", 1) != 1) ::_exit(1);
      while (true) ::pause();
    }
    ::close(ready[1]);
    char byte = 0;
    is_ready_ = ::read(ready[0], &byte, 1) == 1;
    ::close(ready[0]);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() { kill(); }
  bool is_ready() const { return is_ready_; }  // act came to its end
  void kill() {
    if (process_ > 0) ::kill(process_, SIGKILL);
    wait();
  }
  void wait() {
    if (process_ > 0) ::waitpid(process_, nullptr, 0);
    process_ = -1;
  }

 private:
  pid_t process_ = -1;
  bool is_ready_ = false;
};

class NamedFiles : public ::testing::Test {
 protected:
  NamedFiles() { set_disk_files(DiskFiles::kNamed); }
  ~NamedFiles() override {
    wait_until_closed();
    set_disk_files(DiskFiles::kHidden);
  }
  std::set<std::string> names() const { return names_in(directory_.path()); }
  // In a process of its own, which leaves it to others to give it back.
  void open_and_leave() { store_.open(kSize).release(); }

  DiskDirectory directory_;
  DiskStore store_;
};

TEST_F(NamedFiles, AreThereWhileTheBackupIs) {
  auto first = store_.open(kSize);
  auto second = store_.open(kSize + 1);
  const std::set<std::string> both = names();
  ASSERT_EQ(both.size(), 2u);
  for (const std::string& name : both) {
    EXPECT_TRUE(name.starts_with("ebbtide_backup_" + std::to_string(::getpid()) + "_")) << name;
    struct stat info{};
    ASSERT_EQ(::stat((directory_.path() + "/" + name).c_str(), &info), 0);
    EXPECT_GE(static_cast<size_t>(info.st_size), kSize);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
  }
  const std::vector<std::byte> content = random_bytes(kSize, 1);
  write_all(*first, content);
  EXPECT_EQ(read_all(*first, kSize), content);
  EXPECT_EQ(std::memcmp(first->view(), content.data(), kSize), 0);
  second.reset();
  EXPECT_EQ(names().size(), 1u);
  first.reset();
  EXPECT_TRUE(directory_.is_empty()) << "at once, though the space may come back later";
}

TEST_F(NamedFiles, OnlyThoseMadeFromNowOn) {
  set_disk_files(DiskFiles::kHidden);
  const auto hidden = store_.open(kSize);
  set_disk_files(DiskFiles::kNamed);
  const auto named = store_.open(kSize);
  EXPECT_EQ(names().size(), 1u);
}

TEST_F(NamedFiles, GoAtTheExitOfTheirProcess) {
  Process ended([&] {
    open_and_leave();
    if (names().size() == 1) std::exit(0);
  });
  ended.wait();
  EXPECT_FALSE(ended.is_ready()) << "the file was not there";
  EXPECT_TRUE(directory_.is_empty());
}

TEST_F(NamedFiles, WhatCouldNotBeRemovedGoesAtTheExit) {
  Process ended([&] {
    auto mine = store_.open(kSize);
    const std::string path = directory_.path() + "/" + *names().begin();
    std::filesystem::rename(path, path + "-moved");
    std::filesystem::create_directory(path);  // as a folder, it is refused
    mine.reset();
    if (names().size() != 2) return;
    std::filesystem::remove(path);
    std::filesystem::rename(path + "-moved", path);
    std::exit(0);
  });
  ended.wait();
  EXPECT_FALSE(ended.is_ready()) << "it was removed before the exit";
  EXPECT_TRUE(directory_.is_empty());
}

TEST_F(NamedFiles, OfAProcessThatWasKilledGoThoughAForkedChildLives) {
  int pipe[2] = {};
  ASSERT_EQ(::pipe(pipe), 0);
  Process killed([&] {
    open_and_leave();
    if (::fork() != 0) return;
    const pid_t child = ::getpid();  // said by itself: by then it has let go of the lock
    if (::write(pipe[1], &child, sizeof child) != sizeof child) ::_exit(1);
    while (true) ::pause();
  });
  ASSERT_TRUE(killed.is_ready());
  pid_t child = 0;
  ASSERT_EQ(::read(pipe[0], &child, sizeof child), static_cast<ssize_t>(sizeof child));
  const ScopeExit end_child([&]() noexcept { ::kill(child, SIGKILL); });
  killed.kill();
  EXPECT_EQ(names().size(), 1u);
  const auto mine = store_.open(kSize);
  EXPECT_EQ(names().size(), 1u) << "mine alone";
  for (const int end : pipe) ::close(end);
}

TEST_F(NamedFiles, StayWhereAForkedChildEnds) {
  auto mine = store_.open(kSize);
  Process child([&] {
    mine.reset();
    std::exit(0);
  });
  child.wait();
  EXPECT_EQ(names().size(), 1u);
}

TEST_F(NamedFiles, OfAProcessThatWasKilledGoWithTheNextThatIsMade) {
  Process killed([&] { open_and_leave(); });
  Process living([&] { open_and_leave(); });
  ASSERT_TRUE(killed.is_ready() && living.is_ready());
  const std::set<std::string> foreign = {"ebbtide_backup_notes",
                                         "ebbtide_backup_12_0123456789abcdeX_1",
                                         "ebbtide_backup_12_0123456789abcdef_",
                                         "ebbtide_backup__0123456789abcdef_1",
                                         "ebbtide_backup_12_0123456789abcdef_1.txt",
                                         "other"};
  for (const std::string& name : foreign) std::ofstream(directory_.path() + "/" + name);
  EXPECT_EQ(names().size(), 2 + foreign.size());
  killed.kill();
  EXPECT_EQ(names().size(), 2 + foreign.size()) << "it was not removed";
  const auto mine = store_.open(kSize);
  const std::set<std::string> left = names();
  EXPECT_EQ(left.size(), 2 + foreign.size()) << "mine, that of the living one, and other files";
  for (const std::string& name : foreign) EXPECT_TRUE(left.contains(name)) << name;
}

TEST_F(NamedFiles, AFileThatAnotherProcessSweptTooEarlyIsMadeAgain) {
  static int count;
  static int taken;
  // The file is gone, or locked, before its maker locks it.
  const auto open_disturbed = [](const char* path, int flags, mode_t mode) {
    const int file = ::open(path, flags, mode);
    ++count;
    if (count == 1) ::unlink(path);
    if (count == 2) {
      taken = ::open(path, O_RDWR);
      EXPECT_EQ(::flock(taken, LOCK_EX | LOCK_NB), 0);
    }
    return file;
  };
  FileCalls calls = kSystemFileCalls;
  calls.open = open_disturbed;
  {
    DiskStore store(calls);
    const auto backup = store.open(kSize);
    EXPECT_EQ(count, 3);
    EXPECT_EQ(names().size(), 1u);
    wait_until_closed();
  }
  ::close(taken);
  wait_until_closed();
}

TEST_F(NamedFiles, NothingIsLeftOfARefusal) {
  FileCalls calls = kSystemFileCalls;
  calls.fallocate = [](int, int, off_t, off_t) {
    errno = ENOSPC;
    return -1;
  };
  EXPECT_THROW(DiskStore(calls).open(kSize), StoreError);
  EXPECT_TRUE(directory_.is_empty());
  calls.open = [](const char*, int, mode_t) {
    errno = EACCES;
    return -1;
  };
  try {
    DiskStore(calls).open(kSize);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const StoreError& error) {
    EXPECT_NE(std::string(error.what()).find("see to its permissions"), std::string::npos) << error.what();
  }
}

class NamedFilesInMemory : public ::testing::Test {
 protected:
  NamedFilesInMemory() {
    std::string name = "/dev/shm/ebbtide-test-XXXXXX";
    path_ = ::mkdtemp(name.data());
    struct statfs info{};
    is_memory_ = ::statfs(path_.c_str(), &info) == 0 && is_memory_file_system(static_cast<uint64_t>(info.f_type));
  }
  ~NamedFilesInMemory() override {
    set_disk_directory("");
    set_disk_files(DiskFiles::kHidden);
    std::filesystem::remove_all(path_);
  }
  std::string path_;
  bool is_memory_ = false;
  DiskStore store_;
};

TEST_F(NamedFilesInMemory, AreAllowedWhereTheUserSaysBothAndWarnedOfOnce) {
  if (!is_memory_) GTEST_SKIP() << "/dev/shm is no tmpfs here";
  set_disk_directory(path_);
  EXPECT_THROW(store_.open(kSize), StoreError);
  EXPECT_THROW(check_disk_directory(path_, DiskFiles::kHidden), StoreError);
  set_disk_files(DiskFiles::kNamed);
  check_disk_directory(path_);
  ::testing::internal::CaptureStderr();
  const auto backup = store_.open(kSize);
  const auto another = store_.open(kSize);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("no disk but RAM"), std::string::npos) << said;
  EXPECT_EQ(said.find("no disk but RAM"), said.rfind("no disk but RAM")) << said;
  EXPECT_EQ(names_in(path_).size(), 2u);
  const std::vector<std::byte> content = random_bytes(kSize, 1);
  write_all(*backup, content);
  EXPECT_EQ(read_all(*backup, kSize), content);
  set_disk_directory("");
  ::setenv("TMPDIR", path_.c_str(), 1);
  EXPECT_THROW(store_.open(kSize), StoreError) << "it was not chosen for this";
  ::unsetenv("TMPDIR");
}

TEST_F(MovesFaults, Invariant3_NamedBackupsOnDisk) {
  const DiskDirectory directory;
  set_disk_files(DiskFiles::kNamed);
  const Act pause_all = [&] { pause(); };
  const Act resume_all = [&] { resume(); };
  const std::vector<ItemSpec> items = {{"w", kDisk, 0, {1}}, {"w", kRetainedDisk, 0, {1, 1}}};
  build(items);
  pause();
  EXPECT_EQ(names_in(directory.path()).size(), 2u) << "a file for each allocation";
  resume();
  EXPECT_EQ(names_in(directory.path()).size(), 1u) << "that of the one that is retained";
  pause();
  EXPECT_EQ(names_in(directory.path()).size(), 2u);
  resume();
  sweep_all({items, [] {}, pause_all, {pause_all, resume_all}});
  sweep_all({items, pause_all, resume_all, {resume_all, pause_all}});
  EXPECT_TRUE(directory.is_empty());
  set_disk_files(DiskFiles::kHidden);
}

}  // namespace
}  // namespace ebbtide::testing
