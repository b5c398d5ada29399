// The system's figures for memory, read from faked trees, and the budget that is based on them.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "base/error.h"
#include "core/budget/host_budget.h"
#include "core/budget/host_reader.h"

namespace ebbtide {
namespace {

namespace fs = std::filesystem;

class HostTree : public ::testing::Test {
 protected:
  HostTree() {
    std::string name = fs::temp_directory_path() / "ebbtide-host-XXXXXX";
    root_ = ::mkdtemp(name.data());
    write("/proc/meminfo",
          "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\nHugePages_Total:     "
          "  0\n");
  }
  ~HostTree() override { fs::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  void group_v2(const std::string& folder, const std::string& limit, uint64_t used, uint64_t active_file = 0,
                uint64_t inactive_file = 0) {
    write("/sys/fs/cgroup" + folder + "/memory.max", limit + "\n");
    write("/sys/fs/cgroup" + folder + "/memory.current", std::to_string(used) + "\n");
    write("/sys/fs/cgroup" + folder + "/memory.stat", "anon 1\nfile 2\nactive_file " + std::to_string(active_file) +
                                                          "\ninactive_file " + std::to_string(inactive_file) + "\n");
  }
  policy::HostMemory read() const { return read_host_memory(root_); }
  std::string root_;
};

TEST_F(HostTree, MeminfoIsReadInKibibytes) {
  EXPECT_EQ(read().total_bytes, 16 * kGiB);
  EXPECT_EQ(read().available_bytes, 8 * kGiB);
  EXPECT_TRUE(read().cgroups.empty());
}

TEST_F(HostTree, MissingFilesDoNotBind) {
  fs::remove(root_ + "/proc/meminfo");
  EXPECT_EQ(read().total_bytes, kUnlimited);
  EXPECT_EQ(read().available_bytes, kUnlimited);
  const policy::HostMemory nothing = read_host_memory(root_ + "/nowhere");
  EXPECT_EQ(nothing.available_bytes, kUnlimited);
  EXPECT_TRUE(nothing.cgroups.empty());
}

TEST_F(HostTree, Version2LevelsUpToTheRootAreRead) {
  write("/proc/self/cgroup", "0::/a/b/c\n");
  group_v2("/a/b/c", "max", 100);
  group_v2("/a/b", std::to_string(4 * kGiB), 3 * kGiB, kGiB / 2, kGiB / 2);
  group_v2("/a", std::to_string(6 * kGiB), kGiB);
  const auto levels = read().cgroups;
  ASSERT_EQ(levels.size(), 2u);
  EXPECT_EQ(levels[0].limit_bytes, 4 * kGiB);
  EXPECT_EQ(levels[0].used_bytes, 3 * kGiB);
  EXPECT_EQ(levels[0].reclaimable_bytes, kGiB);
  EXPECT_EQ(levels[1].limit_bytes, 6 * kGiB);
}

// In a container the root of the namespace is the process's own group.
TEST_F(HostTree, Version2InANamespaceIsTheRootItself) {
  write("/proc/self/cgroup", "0::/\n");
  group_v2("", std::to_string(2 * kGiB), kGiB);
  const auto levels = read().cgroups;
  ASSERT_EQ(levels.size(), 1u);
  EXPECT_EQ(levels[0].limit_bytes, 2 * kGiB);
}

TEST_F(HostTree, Version1IsReadWithItsTotals) {
  write("/proc/self/cgroup", "12:cpu,cpuacct:/x\n7:memory:/docker/abc\n0::/system.slice\n");
  const std::string folder = "/sys/fs/cgroup/memory/docker/abc";
  write(folder + "/memory.limit_in_bytes", std::to_string(3 * kGiB) + "\n");
  write(folder + "/memory.usage_in_bytes", std::to_string(kGiB) + "\n");
  write(folder + "/memory.stat", "active_file 5\ninactive_file 5\ntotal_active_file 1000\ntotal_inactive_file 24\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "5\n");
  const auto levels = read().cgroups;
  ASSERT_EQ(levels.size(), 1u);
  EXPECT_EQ(levels[0].limit_bytes, 3 * kGiB);
  EXPECT_EQ(levels[0].used_bytes, kGiB);
  EXPECT_EQ(levels[0].reclaimable_bytes, 1024u);
}

// Docker with v1: the path in /proc is that of the host, and the mount's root is the container's own group.
TEST_F(HostTree, Version1WhosePathIsNotMountedFallsBackToTheMount) {
  write("/proc/self/cgroup", "7:memory:/docker/abc\n");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", std::to_string(kGiB));
  write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "4096");
  ASSERT_EQ(read().cgroups.size(), 1u);
  EXPECT_EQ(read().cgroups[0].limit_bytes, kGiB);
}

TEST_F(HostTree, HybridHierarchiesAreBothRead) {
  write("/proc/self/cgroup", "3:memory:/m\n0::/u\n");
  write("/sys/fs/cgroup/memory/m/memory.limit_in_bytes", std::to_string(kGiB));
  write("/sys/fs/cgroup/memory/m/memory.usage_in_bytes", "1");
  write("/sys/fs/cgroup/unified/u/memory.max", std::to_string(2 * kGiB));
  write("/sys/fs/cgroup/unified/u/memory.current", "1");
  EXPECT_EQ(read().cgroups.size(), 2u);
}

TEST_F(HostTree, NonsenseDoesNotBindAndDoesNotThrow) {
  write("/proc/meminfo", "MemTotal: lots\n:\n\nMemAvailable:\n\x80\xff garbage");
  write("/proc/self/cgroup", "0::/a\n::\nno colons\n7:memory\n\n9:memory:\n0:" + std::string(100000, 'x') + "\n");
  group_v2("/a", "-5", 1);
  EXPECT_NO_THROW(read());
  for (const std::string bad : {"", "eleven", "18446744073709551616", "\n\n"}) {
    group_v2("/a", bad, 1);
    EXPECT_TRUE(read().cgroups.empty()) << bad;
  }
  fs::remove_all(root_ + "/sys");
  fs::create_directories(root_ + "/sys/fs/cgroup/a/memory.max");  // a folder where a file should be
  EXPECT_TRUE(read().cgroups.empty());
}

// A MemTotal that cannot be read must not read as "no memory at all".
TEST_F(HostTree, AMeminfoWithoutTheNumbersDoesNotBind) {
  write("/proc/meminfo", "Something: 1 kB\n");
  EXPECT_EQ(read().total_bytes, kUnlimited);
  EXPECT_EQ(read().available_bytes, kUnlimited);
}

TEST_F(HostTree, TheRealSystemSaysSomething) {
  const policy::HostMemory real = read_host_memory();
  EXPECT_GT(real.total_bytes, 64 * kMiB);
  EXPECT_LE(real.available_bytes, real.total_bytes);
}

TEST_F(HostTree, Invariant7_TheContainersLimitCountsForBackups) {
  write("/proc/self/cgroup", "0::/a\n");
  group_v2("/a", std::to_string(4 * kGiB), 2 * kGiB, 0, kGiB);
  HostBudget budget(root_);
  budget.set_margin(kGiB);
  EXPECT_EQ(budget.available_bytes(), 2 * kGiB);
  const HostCharge first = budget.charge(kGiB, "the backup of 'w'");
  EXPECT_EQ(budget.available_bytes(), kGiB);
  try {
    budget.charge(kGiB + 1, "the backup of 'w'");
    FAIL() << "nothing was thrown";
  } catch (const StoreError& error) {
    EXPECT_EQ(error.shortage.requested_bytes, kGiB + 1);
    EXPECT_EQ(error.shortage.free_bytes, kGiB);
    EXPECT_EQ(error.shortage.limit_bytes, 4 * kGiB);
    EXPECT_NE(std::string(error.what()).find("the backup of 'w'"), std::string::npos);
  }
  // Memory that other processes take counts at once.
  group_v2("/a", std::to_string(4 * kGiB), 3 * kGiB);
  EXPECT_THROW(budget.charge(1, "x"), StoreError);
}

TEST_F(HostTree, ChargesMoveFromPromisedToTouchedAndBack) {
  HostBudget budget(root_);
  budget.set_margin(0);
  HostCharge charge = budget.charge(6 * kGiB, "x");
  EXPECT_EQ(budget.available_bytes(), 2 * kGiB);
  charge.touch(4 * kGiB);  // the kernel counts these from now on; this tree's MemAvailable does not change
  EXPECT_EQ(budget.available_bytes(), 6 * kGiB);
  EXPECT_EQ(budget.held_bytes(), 6 * kGiB);
  charge.touch(100 * kGiB);
  EXPECT_EQ(budget.available_bytes(), 8 * kGiB);
  EXPECT_EQ(charge.size_bytes(), 6 * kGiB);
  HostCharge other = budget.charge(kGiB, "y");
  HostCharge part = other.split_promised(kGiB / 4);
  EXPECT_EQ(other.size_bytes() + part.size_bytes(), kGiB);
  charge.merge(std::move(part));
  EXPECT_EQ(part.size_bytes(), 0u);  // NOLINT(bugprone-use-after-move): what a moved-from charge is
  other.split_promised(kUnlimited);
  EXPECT_EQ(budget.held_bytes(), 6 * kGiB + kGiB / 4);
  charge = HostCharge{};
  EXPECT_EQ(budget.held_bytes(), 0u);
  const HostCharge pinned = budget.charge_outside_cgroups(kGiB, "ring");
  EXPECT_EQ(budget.held_bytes(), kGiB);
}

TEST_F(HostTree, Invariant7_TwoThreadsNeverPassOneCheckTogether) {
  HostBudget budget(root_);
  budget.set_margin(0);
  budget.set_limit(10 * kMiB);
  std::atomic<int> passed{0};
  std::atomic<uint64_t> most{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 40; ++round) {
        try {
          HostCharge charge = budget.charge(3 * kMiB, "x");
          ++passed;
          const uint64_t held = budget.held_bytes();
          for (uint64_t seen = most.load(); held > seen && !most.compare_exchange_weak(seen, held);) {
          }
          charge.touch(kMiB);
        } catch (const StoreError&) {
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(passed.load(), 0);
  EXPECT_LE(most.load(), 10 * kMiB);
  EXPECT_EQ(budget.held_bytes(), 0u);
}

TEST_F(HostTree, TheLowerOneOfBothLimitsHoldsAndIsNamed) {
  HostBudget budget(root_);
  budget.set_margin(0);
  const auto refusal = [&] {
    try {
      budget.require_room(5 * kMiB, "it");
    } catch (const StoreError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  budget.set_lms_limit(4 * kMiB);
  EXPECT_NE(refusal().find("(limit 4 MiB by large model support, "), std::string::npos) << refusal();
  EXPECT_NE(refusal().find("or change host_limit of large model support"), std::string::npos) << refusal();
  EXPECT_EQ(budget.own_limit_bytes(), kUnlimited);
  EXPECT_EQ(budget.limit_bytes(), 4 * kMiB);
  EXPECT_EQ(budget.available_bytes(), 4 * kMiB);
  write("/proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 2048 kB\n");  // leaves less than that limit
  EXPECT_NE(refusal().find("(limit 4 MiB by large model support, "), std::string::npos) << refusal();
  EXPECT_NE(refusal().find("or change host_limit (EBBTIDE_HOST_LIMIT, --host-limit) and host_margin"),
            std::string::npos)
      << refusal();
  write("/proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n");
  budget.set_limit(3 * kMiB);
  EXPECT_NE(refusal().find("(limit 3 MiB by "), std::string::npos) << refusal();
  EXPECT_EQ(refusal().find("large model support"), std::string::npos) << refusal();
  EXPECT_EQ(budget.limit_bytes(), 3 * kMiB);
  EXPECT_EQ(budget.own_limit_bytes(), 3 * kMiB);
  budget.set_limit(kUnlimited);
  budget.set_lms_limit(kUnlimited);
  EXPECT_EQ(refusal(), "");
}

}  // namespace
}  // namespace ebbtide
