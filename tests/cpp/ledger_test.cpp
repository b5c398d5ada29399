// The ledger of a run: between objects of one process, which are strangers to each other as processes are, and between real processes that die while they hold.
#include "core/ledger.h"

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
#include "core/host_budget.h"
#include "vmm/limbo.h"
#include "vmm/physical_memory.h"

namespace ebbtide::testing {
namespace {

constexpr const char* kPathVariable = "EBBTIDE_TEST_LEDGER";
constexpr const char* kRoleVariable = "EBBTIDE_TEST_LEDGER_ROLE";

class LedgerTest : public ::testing::Test {
 protected:
  LedgerTest() : path_(std::filesystem::temp_directory_path() / ("ebbtide-ledger-" + std::to_string(::getpid()))) {
    std::filesystem::remove(path_);
  }
  ~LedgerTest() override { std::filesystem::remove(path_); }

  std::unique_ptr<Ledger> open() { return Ledger::open(path_); }
  // A budget that may hold so much together with all others of the run.
  std::unique_ptr<HostBudget> budget(uint64_t limit_bytes) {
    auto made = std::make_unique<HostBudget>();
    made->set_margin(0);
    made->set_limit(limit_bytes);
    made->join(open());
    return made;
  }

  const std::filesystem::path path_;
};

// A process of its own in one of the roles below.
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
  // Waits for what it says; '\0' where it ended instead.
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

void answer(char said) {
  if (::write(3, &said, 1) != 1) ::_exit(98);
}
void wait_for_word() {
  char word = '\0';
  if (::read(STDIN_FILENO, &word, 1) != 1) ::_exit(97);
}

// How many files of this process are this one.
int count_of_files(const std::filesystem::path& path) {
  int count = 0;
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    count += std::filesystem::read_symlink(file.path(), gone) == path ? 1 : 0;
  }
  return count;
}

TEST_F(LedgerTest, EachSeesWhatTheOthersHold) {
  const auto first = open();
  const auto second = open();
  first->publish({1, 20, 300});
  second->publish({4000, 50000, 600000});
  EXPECT_EQ(policy::total(first->others()), 654000u);
  EXPECT_EQ(first->others().touched_bytes, 50000u);
  EXPECT_EQ(policy::total(second->others()), 321u);
  const auto third = open();
  EXPECT_EQ(policy::total(third->others()), 654321u);
}

TEST_F(LedgerTest, WhoHasGoneHoldsNothingAndItsSlotIsTakenAgain) {
  const auto watcher = open();
  for (int round = 0; round < 1000; ++round) {
    const auto other = open();
    EXPECT_EQ(policy::total(watcher->others()), 0u) << "a new slot is empty";
    other->publish({7, 0, 0});
    EXPECT_EQ(policy::total(watcher->others()), 7u);
  }
  EXPECT_EQ(policy::total(watcher->others()), 0u);
}

TEST_F(LedgerTest, AFullLedgerSaysSo) {
  std::vector<std::unique_ptr<Ledger>> all;
  for (uint32_t slot = 0; slot < Ledger::kSlotCount; ++slot) all.push_back(open());
  EXPECT_THROW(open(), StateError);
  all.pop_back();
  EXPECT_NO_THROW(open());
}

TEST_F(LedgerTest, WhatIsNoLedgerIsRefused) {
  constexpr size_t kLedgerBytes = size_t{4096} * (1 + Ledger::kSlotCount);
  for (const size_t size_bytes : {size_t{1}, kLedgerBytes - 1, kLedgerBytes, kLedgerBytes + 1}) {
    const std::string content(size_bytes, 'x');
    std::ofstream(path_) << content;
    EXPECT_THROW(open(), StateError);
    std::ifstream file(path_);
    EXPECT_TRUE(std::string(std::istreambuf_iterator<char>(file), {}) == content) << size_bytes << " bytes changed";
  }
  EXPECT_THROW(Ledger::open("/proc/no/such/folder"), StateError);
}

// As the next run sweeps (python/ebbtide/ledger.py): it locks all of the file and removes it, while another process has it open already and waits.
TEST_F(LedgerTest, Invariant7_WhatIsRemovedBeforeItIsLockedIsOpenedAgain) {
  const int sweeper = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  struct flock whole{};
  whole.l_type = F_WRLCK;
  ASSERT_EQ(::fcntl(sweeper, F_OFD_SETLK, &whole), 0);
  const auto opened = std::filesystem::canonical(path_);
  auto waiting = std::async(std::launch::async, [&] { return open(); });
  while (count_of_files(opened) < 2) std::this_thread::yield();
  std::filesystem::remove(path_);
  ::close(sweeper);
  const auto first = waiting.get();
  first->publish({7, 0, 0});
  ASSERT_TRUE(std::filesystem::exists(path_));
  EXPECT_EQ(policy::total(open()->others()), 7u);
}

TEST_F(LedgerTest, Invariant4_AFullFileSystemIsAnError) {
  std::filesystem::create_directory(path_);
  Process process("fill", path_);
  const char said = process.listen();
  if (said == 's') GTEST_SKIP() << "this process may mount nothing";
  EXPECT_EQ(said, 'e') << "the header has no page";
  EXPECT_EQ(process.listen(), 'e') << "the first slot has none";
  EXPECT_EQ(process.listen(), 'y');
  EXPECT_EQ(process.listen(), 'e') << "the second slot has none";
  EXPECT_EQ(process.listen(), 'y') << "one that was left is taken again";
}

TEST_F(LedgerTest, Invariant4_ALimitOnFilesIsAnError) {
  Process process("limit", path_);
  EXPECT_EQ(process.listen(), 'e');
  EXPECT_EQ(process.listen(), 'y') << "it need not grow again";
}

TEST_F(LedgerTest, WhatSomebodyBeganToMakeIsTakenUp) {
  std::ofstream(path_).put('\0');
  EXPECT_THROW(open(), StateError) << "none makes it so small";
  std::filesystem::resize_file(path_, size_t{4096} * (1 + Ledger::kSlotCount));
  EXPECT_NO_THROW(open());
}

TEST_F(LedgerTest, Invariant7_OneBudgetForAll) {
  const auto mine = budget(10 * kMiB);
  const auto theirs = budget(10 * kMiB);
  HostClaim claim = theirs->claim(4 * kMiB, "theirs");
  claim.touch(kMiB);
  const HostClaim pinned = theirs->claim_uncharged(2 * kMiB, "theirs");
  EXPECT_EQ(mine->held_bytes(), 0u);
  EXPECT_EQ(mine->available_bytes(), 4 * kMiB);
  try {
    mine->claim(5 * kMiB, "mine");
    ADD_FAILURE() << "nothing was thrown";
  } catch (const StoreError& error) {
    EXPECT_EQ(error.shortage.free_bytes, 4 * kMiB);
    EXPECT_NE(std::string(error.what()).find("other processes of this run hold 6 MiB"), std::string::npos);
  }
  claim.reset();
  EXPECT_EQ(mine->available_bytes(), 8 * kMiB);
}

TEST_F(LedgerTest, Invariant7_OneOfManyGetsTheLastBytes) {
  for (int round = 0; round < 20; ++round) {
    std::vector<std::unique_ptr<HostBudget>> budgets;
    for (int i = 0; i < 6; ++i) budgets.push_back(budget(5 * kMiB));
    std::atomic<int> successes{0};
    std::vector<HostClaim> claims(budgets.size());
    {
      std::vector<std::jthread> threads;
      for (size_t i = 0; i < budgets.size(); ++i) {
        threads.emplace_back([&, i] {
          try {
            claims[i] =
                i % 2 == 0 ? budgets[i]->claim(3 * kMiB, "a race") : budgets[i]->claim_uncharged(3 * kMiB, "a race");
            ++successes;
          } catch (const StoreError&) {
          }
        });
      }
    }
    EXPECT_EQ(successes, 1);
  }
}

TEST_F(LedgerTest, Invariant7_OthersSeeWhatCouldNotBeGivenBack) {
  const auto watcher = open();
  Process process("limbo", path_);
  ASSERT_EQ(process.listen(), 'l');
  EXPECT_EQ(policy::total(watcher->others()), 4 * kMiB);
}

TEST_F(LedgerTest, AProcessThatIsKilledHoldsNothing) {
  const auto watcher = open();
  for (int round = 0; round < 2; ++round) {
    Process process("hold", path_);
    ASSERT_EQ(process.listen(), 'h');
    EXPECT_EQ(policy::total(watcher->others()), 5 * kMiB);
    process.kill();
    EXPECT_EQ(policy::total(watcher->others()), 0u);
  }
}

TEST_F(LedgerTest, AProcessThatIsKilledDuringItsTurnBlocksNobody) {
  const auto mine = budget(10 * kMiB);
  Process process("take_turn", path_);
  ASSERT_EQ(process.listen(), 't');
  process.kill();
  EXPECT_EQ(mine->claim(kMiB, "mine").size_bytes(), kMiB);
}

TEST_F(LedgerTest, Invariant7_OneOfTwoProcessesGetsTheLastBytes) {
  for (int round = 0; round < 3; ++round) {
    Process first("race", path_);
    Process second("race", path_);
    ASSERT_EQ(first.listen(), 'r');
    ASSERT_EQ(second.listen(), 'r');
    first.say();
    second.say();
    const std::string said = {first.listen(), second.listen()};
    EXPECT_TRUE(said == "yn" || said == "ny") << said;
    // The one that lost gets them when the winner is dead.
    Process& loser = said == "yn" ? second : first;
    (said == "yn" ? first : second).kill();
    loser.say();
    EXPECT_EQ(loser.listen(), 'y');
  }
}

TEST_F(LedgerTest, Invariant10_AForkedChildDoesNotKeepADeadParentsSlot) {
  const auto watcher = open();
  Process process("fork", path_);
  ASSERT_EQ(process.listen(), 'f');  // its child lives, with all that it inherits
  EXPECT_EQ(policy::total(watcher->others()), 5 * kMiB);
  process.kill();
  EXPECT_EQ(policy::total(watcher->others()), 0u);
}

TEST_F(LedgerTest, Invariant10_AChildForkedWhileOneIsOpenedHasNothingOfIt) {
  const auto first = open();
  struct stat mine{};
  ASSERT_EQ(::stat(path_.c_str(), &mine), 0);
  const std::jthread opener([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) open();
  });
  for (int round = 0; round < 300; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      int count = 0;
      struct stat found{};
      for (int file = 0; file < 256; ++file) {
        count += ::fstat(file, &found) == 0 && found.st_ino == mine.st_ino && found.st_dev == mine.st_dev ? 1 : 0;
      }
      ::_exit(count);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0) << "in round " << round;
  }
}

// --- what the processes do ---

void hold(const std::string& path) {
  const auto ledger = Ledger::open(path);
  ledger->publish({kMiB, kMiB, 3 * kMiB});
  answer('h');
  wait_for_word();
}

void take_turn(const std::string& path) {
  const auto ledger = Ledger::open(path);
  const auto turn = ledger->take_turn();
  answer('t');
  wait_for_word();
}

void hold_limbo(const std::string& path) {
  HostBudget budget;
  budget.set_margin(0);
  budget.join(Ledger::open(path));
  HostClaim released = budget.claim_uncharged(3 * kMiB, "what stays");
  limbo::add_release(1, 3 * kMiB, kOnHost);
  released.reset();
  const HostClaim held = budget.claim_uncharged(kMiB, "what is held");
  answer('l');
  wait_for_word();
}

void race(const std::string& path) {
  HostBudget budget;
  budget.set_margin(0);
  budget.set_limit(5 * kMiB);
  budget.join(Ledger::open(path));
  answer('r');
  std::vector<HostClaim> claims;
  while (true) {
    wait_for_word();
    try {
      claims.push_back(budget.claim_uncharged(3 * kMiB, "a race"));
      answer('y');
    } catch (const StoreError&) {
      answer('n');
    }
  }
}

std::unique_ptr<Ledger> try_open(const std::string& path) {
  try {
    auto ledger = Ledger::open(path);
    ledger->publish({1, 1, 1});
    answer('y');
    return ledger;
  } catch (const StateError&) {
    answer('e');
    return nullptr;
  }
}

// A file system of two pages, which this process alone sees.
bool mount_tiny(const std::string& folder) {
  const std::string user = "0 " + std::to_string(::geteuid()) + " 1";
  const std::string group = "0 " + std::to_string(::getegid()) + " 1";
  if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
  std::ofstream("/proc/self/uid_map") << user;
  std::ofstream("/proc/self/setgroups") << "deny";
  std::ofstream("/proc/self/gid_map") << group;
  return ::mount("none", folder.c_str(), "tmpfs", 0, "size=8k") == 0;
}

void fill(const std::string& folder) {
  if (!mount_tiny(folder)) return answer('s');
  const std::string path = folder + "/ledger";
  const std::string page(4096, 'x');
  for (const int files : {2, 1}) {
    for (int i = 0; i < files; ++i) std::ofstream(folder + "/" + std::to_string(i)) << page;
    try_open(path);
    for (int i = 0; i < files; ++i) std::filesystem::remove(folder + "/" + std::to_string(i));
  }
  auto first = try_open(path);
  try_open(path);
  first.reset();
  try_open(path);
}

void limit_files(const std::string& path) {
  struct rlimit all{};
  ::getrlimit(RLIMIT_FSIZE, &all);
  const struct rlimit none = {4096, all.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &none);
  try_open(path);
  ::setrlimit(RLIMIT_FSIZE, &all);
  Ledger::open(path);
  ::setrlimit(RLIMIT_FSIZE, &none);
  try_open(path);
}

void fork_and_wait(const std::string& path) {
  const auto ledger = Ledger::open(path);
  ledger->publish({5 * kMiB, 0, 0});
  if (::fork() == 0) {
    answer('f');
    wait_for_word();  // until the pipe ends with the test
    ::_exit(0);
  }
  while (true) ::pause();
}

// Instead of main, where the environment gives this process a role.
[[maybe_unused]] const bool has_no_role = [] {
  const char* role = std::getenv(kRoleVariable);
  if (role == nullptr) return true;
  const std::string name = role;
  const std::string path = std::getenv(kPathVariable);
  if (name == "hold") hold(path);
  if (name == "take_turn") take_turn(path);
  if (name == "limbo") hold_limbo(path);
  if (name == "race") race(path);
  if (name == "fill") fill(path);
  if (name == "limit") limit_files(path);
  if (name == "fork") fork_and_wait(path);
  ::_exit(96);
}();

}  // namespace
}  // namespace ebbtide::testing
