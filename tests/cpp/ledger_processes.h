#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <thread>
#include <vector>

#include "base/error.h"
#include "core/budget/host_budget.h"
#include "vmm/deferred_undos.h"
#include "vmm/physical_memory.h"

// Separate processes for the ledger's tests: this program again, in one of the roles of ledger_roles.cpp.
namespace ebbtide::testing {

inline constexpr const char* kPathVariable = "EBBTIDE_TEST_LEDGER";
inline constexpr const char* kRoleVariable = "EBBTIDE_TEST_LEDGER_ROLE";

// A process in one of the roles of ledger_roles.cpp.
class Process {
 public:
  Process(const char* role, const std::string& path) {
    std::array<int, 2> to_child{};
    std::array<int, 2> from_child{};
    if (::pipe(to_child.data()) != 0 || ::pipe(from_child.data()) != 0) throw StateError("no pipe");
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(to_child[0], STDIN_FILENO);
      ::dup2(from_child[1], 3);
      for (const int file : {to_child[0], to_child[1], from_child[0], from_child[1]}) {
        if (file != 3) ::close(file);
      }
      ::setenv(kPathVariable, path.c_str(), 1);
      ::setenv(kRoleVariable, role, 1);
      ::execl("/proc/self/exe", "ebbtide_tests", nullptr);
      ::_exit(99);
    }
    ::close(to_child[0]);
    ::close(from_child[1]);
    to_ = to_child[1];
    from_ = from_child[0];
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() {
    kill();
    ::close(to_);
    ::close(from_);
  }
  // Waits for the next letter from the process. Returns '\0' if it ended instead.
  char listen() const {
    char said = '\0';
    return ::read(from_, &said, 1) == 1 ? said : '\0';
  }
  void say() const { ASSERT_EQ(::write(to_, "x", 1), 1); }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  int to_ = -1;
  int from_ = -1;
};

inline void answer(char said) {
  if (::write(3, &said, 1) != 1) ::_exit(98);
}
inline void wait_for_word() {
  char word = '\0';
  if (::read(STDIN_FILENO, &word, 1) != 1) ::_exit(97);
}

// How many open files of this process are this file.
inline int count_of_files(const std::filesystem::path& path) {
  int count = 0;
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    count += std::filesystem::read_symlink(file.path(), gone) == path ? 1 : 0;
  }
  return count;
}

}  // namespace ebbtide::testing
