// The ledger of a run, between objects of one process, which are as separate as processes, and between real processes
// that die while they hold memory.
#include "core/budget/ledger.h"

#include "ledger_processes.h"

namespace ebbtide::testing {
namespace {

class LedgerTest : public ::testing::Test {
 protected:
  LedgerTest() : path_(std::filesystem::temp_directory_path() / ("ebbtide-ledger-" + std::to_string(::getpid()))) {
    std::filesystem::remove(path_);
  }
  ~LedgerTest() override { std::filesystem::remove(path_); }

  std::unique_ptr<Ledger> open() { return Ledger::open(path_); }
  // A budget that limits the sum of all participants of the run.
  std::unique_ptr<HostBudget> budget(uint64_t limit_bytes) {
    auto made = std::make_unique<HostBudget>();
    made->set_margin(0);
    made->set_limit(limit_bytes);
    made->join(open());
    return made;
  }

  const std::filesystem::path path_;
};

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

TEST_F(LedgerTest, AForeignFileIsRefused) {
  constexpr size_t kLedgerBytes = Ledger::kFileBytes;
  for (const size_t size_bytes : {size_t{1}, kLedgerBytes - 1, kLedgerBytes, kLedgerBytes + 1}) {
    const std::string content(size_bytes, 'x');
    std::ofstream(path_) << content;
    EXPECT_THROW(open(), StateError);
    std::ifstream file(path_);
    EXPECT_TRUE(std::string(std::istreambuf_iterator<char>(file), {}) == content) << size_bytes << " bytes changed";
  }
  EXPECT_THROW(Ledger::open("/proc/no/such/folder"), StateError);
}

TEST_F(LedgerTest, Invariant7_WhoOpensOneThatWasTruncatedSeesThoseThatLive) {
  auto first = open();
  const auto second = open();
  second->publish({8, 0, 0});
  first.reset();
  ASSERT_EQ(::truncate(path_.c_str(), 0), 0);
  second->publish({9, 0, 0});  // into no page that is not there
  const auto third = open();
  EXPECT_EQ(policy::total(third->others()), 0u) << "until the other one tells again";
  second->publish({10, 0, 0});
  EXPECT_EQ(policy::total(third->others()), 10u);
}

TEST_F(LedgerTest, Invariant7_OneThatWasEmptiedIsMendedWhateverItsSize) {
  constexpr off_t kLedgerBytes = Ledger::kFileBytes;
  const auto first = open();
  const auto second = open();
  for (const off_t size_bytes : {off_t{0}, off_t{5000}, kLedgerBytes}) {
    ASSERT_EQ(::truncate(path_.c_str(), 0), 0);
    ASSERT_EQ(::truncate(path_.c_str(), size_bytes), 0);
    first->publish({3, 0, 0});
    EXPECT_EQ(policy::total(second->others()), 0u);
    const auto turn = second->take_turn();
    second->mend();
    first->publish({4, 0, 0});
    second->publish({5, 0, 0});
    EXPECT_EQ(policy::total(second->others()), 4u);
    EXPECT_EQ(policy::total(first->others()), 5u);
  }
}

TEST_F(LedgerTest, Invariant7_AClaimThatMendsAndIsRefusedTellsTheHeldBytes) {
  const auto first = budget(20);
  const HostCharge held = first->charge(15, "what the first one holds");
  const auto second = budget(20);
  ASSERT_EQ(::truncate(path_.c_str(), 0), 0);
  EXPECT_THROW(first->charge(10, "too much"), StoreError);
  EXPECT_THROW(second->charge(10, "as much"), StoreError);
  EXPECT_NO_THROW(second->charge(5, "what is left"));
}

// As the sweep of the next run (python/ebbtide/launch/ledger.py): it locks the whole file and removes it, while another
// process has already opened the file and waits.
TEST_F(LedgerTest, Invariant7_AFileRemovedBeforeItIsLockedIsOpenedAgain) {
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
  EXPECT_EQ(said, 'e') << "the file has no page";
  EXPECT_EQ(process.listen(), 'y');
  EXPECT_EQ(process.listen(), 'y') << "the second slot is on the same page";
}

TEST_F(LedgerTest, Invariant4_ALimitOnFilesIsAnError) {
  Process process("limit", path_);
  EXPECT_EQ(process.listen(), 'e');
  EXPECT_EQ(process.listen(), 'y') << "one that is open tells nothing more";
  EXPECT_EQ(process.listen(), 'e');
}

TEST_F(LedgerTest, OnlyAnEmptyOrEmptiedFileIsTakenUp) {
  for (const size_t size_bytes : {size_t{0}, size_t{1}, Ledger::kFileBytes}) {
    std::ofstream(path_, std::ios::trunc) << std::string(size_bytes, '\0');
    EXPECT_NO_THROW(open()) << size_bytes;
  }
  std::ofstream(path_, std::ios::trunc) << std::string(Ledger::kFileBytes + 1, '\0');
  EXPECT_THROW(open(), StateError);
}

TEST_F(LedgerTest, ALinkIsRefusedAndNothingIsMadeBehindIt) {
  const std::filesystem::path target = path_.string() + "-target";
  for (const bool is_dangling : {true, false}) {
    if (!is_dangling) std::ofstream{target};
    std::filesystem::create_symlink(target, path_);
    EXPECT_THROW(open(), StateError);
    EXPECT_EQ(std::filesystem::exists(target), !is_dangling);
    if (!is_dangling) EXPECT_EQ(std::filesystem::file_size(target), 0u);
    std::filesystem::remove(path_);
  }
  std::filesystem::remove(target);
}

TEST_F(LedgerTest, AFolderIsRefused) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_THROW(open(), StateError);
  std::filesystem::remove(path_);
  std::filesystem::create_directory(path_);
  EXPECT_THROW(open(), StateError);
}

TEST_F(LedgerTest, AnotherUsersFileIsRefusedAndStaysAsItIs) {
  std::ofstream{path_};
  if (::chown(path_.c_str(), ::geteuid() + 1, static_cast<gid_t>(-1)) != 0) GTEST_SKIP() << "chown needs root";
  try {
    open();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("another user's"), std::string::npos) << error.what();
  }
  EXPECT_EQ(std::filesystem::file_size(path_), 0u);
}

// Between any check and the access: a mapping would end the process.
TEST_F(LedgerTest, Invariant4_AFileThatItsOwnerTruncatesAllTheTimeIsNoSignal) {
  const auto first = budget(20);
  const auto second = budget(20);
  const std::jthread owner([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      ASSERT_EQ(::truncate(path_.c_str(), 0), 0);
      std::this_thread::yield();
    }
  });
  for (int round = 0; round < 2000; ++round) {
    const HostCharge held = first->charge(10, "what is held");
    static_cast<void>(second->available_bytes());
  }
}

TEST_F(LedgerTest, AProgramThatClosesTheFileCountsAloneAndItsOwnFilesStay) {
  const auto canonical = std::filesystem::canonical(path_.parent_path()) / path_.filename();
  const auto mine = budget(20);
  const auto watcher = open();
  int number = -1;
  for (int file = 3; file < 1024 && number < 0; ++file) {
    std::error_code gone;
    const auto link = "/proc/self/fd/" + std::to_string(file);
    if (std::filesystem::read_symlink(link, gone) == canonical) number = file;
  }
  const std::filesystem::path other = path_.string() + "-other";
  const int opened = ::open(other.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_EQ(::dup2(opened, number), number);  // the first descriptor is the budget's
  const HostCharge held = mine->charge(15, "what is held");
  EXPECT_EQ(policy::total(watcher->others()), 0u);
  EXPECT_EQ(mine->available_bytes(), 5u);
  EXPECT_EQ(std::filesystem::file_size(other), 0u);
  ::close(opened);
  std::filesystem::remove(other);
}

TEST_F(LedgerTest, ASlotThatIsHalfWrittenTellsNothing) {
  const auto first = open();
  const auto second = open();
  for (size_t offset = 0; offset < Ledger::kSlotBytes; ++offset) {
    first->publish({5, 60, 700});
    ASSERT_EQ(policy::total(second->others()), 765u);
    std::fstream(path_, std::ios::in | std::ios::out).seekp(Ledger::kHeaderBytes + offset).put('\xEE');
    EXPECT_EQ(policy::total(second->others()), 0u) << "byte " << offset;
  }
}

TEST_F(LedgerTest, Invariant7_OneBudgetForAll) {
  const auto mine = budget(10 * kMiB);
  const auto theirs = budget(10 * kMiB);
  HostCharge charge = theirs->charge(4 * kMiB, "theirs");
  charge.touch(kMiB);
  const HostCharge pinned = theirs->charge_outside_cgroups(2 * kMiB, "theirs");
  EXPECT_EQ(mine->held_bytes(), 0u);
  EXPECT_EQ(mine->available_bytes(), 4 * kMiB);
  try {
    mine->charge(5 * kMiB, "mine");
    ADD_FAILURE() << "nothing was thrown";
  } catch (const StoreError& error) {
    EXPECT_EQ(error.shortage.free_bytes, 4 * kMiB);
    EXPECT_NE(std::string(error.what()).find("other processes of this run hold 6 MiB"), std::string::npos);
  }
  charge.reset();
  EXPECT_EQ(mine->available_bytes(), 8 * kMiB);
}

TEST_F(LedgerTest, Invariant7_OneOfManyGetsTheLastBytes) {
  for (int round = 0; round < 20; ++round) {
    std::vector<std::unique_ptr<HostBudget>> budgets;
    for (int i = 0; i < 6; ++i) budgets.push_back(budget(5 * kMiB));
    std::atomic<int> successes{0};
    std::vector<HostCharge> claims(budgets.size());
    {
      std::vector<std::jthread> threads;
      for (size_t i = 0; i < budgets.size(); ++i) {
        threads.emplace_back([&, i] {
          try {
            claims[i] = i % 2 == 0 ? budgets[i]->charge(3 * kMiB, "a race")
                                   : budgets[i]->charge_outside_cgroups(3 * kMiB, "a race");
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
  Process process("deferred_undo", path_);
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

TEST_F(LedgerTest, AProcessThatIsKilledDuringItsTurnBlocksNoOther) {
  const auto mine = budget(10 * kMiB);
  Process process("take_turn", path_);
  ASSERT_EQ(process.listen(), 't');
  process.kill();
  EXPECT_EQ(mine->charge(kMiB, "mine").size_bytes(), kMiB);
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
    // The loser gets the bytes once the winner is dead.
    Process& loser = said == "yn" ? second : first;
    (said == "yn" ? first : second).kill();
    loser.say();
    EXPECT_EQ(loser.listen(), 'y');
  }
}

TEST_F(LedgerTest, Invariant10_AForkedChildDoesNotKeepADeadParentsSlot) {
  const auto watcher = open();
  Process process("fork", path_);
  ASSERT_EQ(process.listen(), 'f');  // its child lives, with everything that it has inherited
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

}  // namespace
}  // namespace ebbtide::testing
