// What leaves the device for large model support, and the peaks that it keeps down. evicted_memory_test.cpp has the
// host memory that it leaves for.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "base/error.h"
#include "core/budget/device_budget.h"
#include "policy/lms/eviction.h"

namespace ebbtide {
namespace {

uint64_t total(const std::vector<policy::Evictable>& candidates, const std::vector<size_t>& chosen) {
  return std::accumulate(chosen.begin(), chosen.end(), uint64_t{0},
                         [&](uint64_t sum, size_t index) { return sum + candidates[index].size_bytes; });
}

TEST(Eviction, TheLastUsedLeavesFirst) {
  const std::vector<policy::Evictable> candidates = {{10, 1}, {10, 3}, {10, 2}};
  EXPECT_EQ(policy::choose_evictions(candidates, 1), std::vector<size_t>({1}));
  EXPECT_EQ(policy::choose_evictions(candidates, 11), std::vector<size_t>({1, 2}));
  EXPECT_EQ(policy::choose_evictions(candidates, 30), std::vector<size_t>({1, 2, 0}));
  EXPECT_EQ(policy::choose_evictions(candidates, 31), std::vector<size_t>({1, 2, 0}));
  EXPECT_TRUE(policy::choose_evictions(candidates, 0).empty());
  EXPECT_TRUE(policy::choose_evictions({}, 1).empty());
}

TEST(Eviction, ALargeOneSparesTheSmallOnesBeforeIt) {
  EXPECT_EQ(policy::choose_evictions({{2, 9}, {3, 8}, {100, 7}}, 50), std::vector<size_t>({2}));
  EXPECT_EQ(policy::choose_evictions({{60, 9}, {3, 8}, {100, 7}}, 150), std::vector<size_t>({0, 2}));
}

TEST(Eviction, EnoughLeavesAndNothingThatNeedNot) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 2000; ++round) {
    std::vector<policy::Evictable> candidates(random() % 20);
    for (auto& candidate : candidates) candidate = {random() % 100, random() % 50};
    const uint64_t wanted = random() % 800;
    const std::vector<size_t> chosen = policy::choose_evictions(candidates, wanted);
    EXPECT_EQ(std::set<size_t>(chosen.begin(), chosen.end()).size(), chosen.size());
    std::vector<size_t> all(candidates.size());
    std::iota(all.begin(), all.end(), size_t{0});
    if (total(candidates, all) < wanted) {
      EXPECT_EQ(total(candidates, chosen), total(candidates, all));
      continue;
    }
    EXPECT_GE(total(candidates, chosen), wanted);
    for (const size_t index : chosen)
      EXPECT_LT(total(candidates, chosen) - candidates[index].size_bytes, wanted) << "it need not leave";
  }
}

TEST(DeviceBudget, PeaksAreKeptUntilTheyAreReset) {
  DeviceBudget budget;
  EXPECT_EQ(budget.peak_bytes(0), 0u);
  DeviceCharge first = budget.charge(0, 100);
  {
    const DeviceCharge second = budget.charge(0, 50);
  }
  const DeviceCharge elsewhere = budget.charge(1, 7);
  EXPECT_EQ(budget.peak_bytes(0), 150u);
  EXPECT_EQ(budget.peak_bytes(1), 7u);
  budget.reset_peaks();
  EXPECT_EQ(budget.peak_bytes(0), 100u);
  first.reset();
  EXPECT_EQ(budget.peak_bytes(0), 100u);
  budget.set_limit(10);
  EXPECT_THROW(budget.charge(0, 11), OutOfMemory);
  EXPECT_EQ(budget.peak_bytes(0), 100u) << "a refused charge is none";
  EXPECT_EQ(budget.peak_bytes(-1), 0u);
}

TEST(DeviceBudget, WhatTheDriverRefusesIsNoPeak) {
  DeviceBudget budget;
  const DeviceCharge held = budget.charge(0, 100);
  {
    const DeviceCharge refused = budget.charge_provisionally(0, 1000);
    EXPECT_EQ(budget.held_bytes(0), 1100u);
  }
  EXPECT_EQ(budget.peak_bytes(0), 100u);
  const DeviceCharge given = budget.charge_provisionally(0, 20);
  budget.note_peak(0);
  EXPECT_EQ(budget.peak_bytes(0), 120u);
}

}  // namespace
}  // namespace ebbtide
