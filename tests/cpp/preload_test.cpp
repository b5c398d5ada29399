// Decisions and counts of the preload library. tests/preload covers the hooks: a test program that contained their
// sources might be hooked itself.
#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "core/budget/device_budget.h"
#include "policy/reported_memory.h"
#include "preload/memory_map.h"

namespace ebbtide {
namespace {

using policy::MemoryNumbers;
using policy::Report;
using policy::report_memory;
using policy::ReportFacts;

TEST(ReportedMemory, WithoutALimitTheTruthIsTheDrivers) {
  const MemoryNumbers told = report_memory({.driver = {5, 9}, .host_available_bytes = 100}, Report::kDevice);
  EXPECT_EQ(told.free_bytes, 5u);
  EXPECT_EQ(told.total_bytes, 9u);
}

TEST(ReportedMemory, FreeGrowsByTheHostButNotAboveTheTotal) {
  ReportFacts facts{.driver = {5, 9}, .host_available_bytes = 3, .host_share_bytes = 5};
  EXPECT_EQ(report_memory(facts, Report::kFree).free_bytes, 8u);
  EXPECT_EQ(report_memory(facts, Report::kFree).total_bytes, 9u);
  EXPECT_EQ(report_memory(facts, Report::kTotal).total_bytes, 14u);
  facts.host_available_bytes = 30;
  EXPECT_EQ(report_memory(facts, Report::kFree).free_bytes, 9u);
}

TEST(ReportedMemory, FreeLeavesOutWhatASpillLeavesFree) {
  ReportFacts facts{.driver = {50, 90}, .reserve_bytes = 8, .host_available_bytes = 20, .host_share_bytes = 20};
  EXPECT_EQ(report_memory(facts, Report::kDevice).free_bytes, 50u);
  EXPECT_EQ(report_memory(facts, Report::kFree).free_bytes, 62u);
  EXPECT_EQ(report_memory(facts, Report::kTotal).free_bytes, 62u);
  facts.host_available_bytes = 3;
  EXPECT_EQ(report_memory(facts, Report::kFree).free_bytes, 50u) << "that much fits without a spill";
}

TEST(ReportedMemory, EveryAnswerIsOneThatAProgramCanUse) {
  std::mt19937_64 random(3);
  const auto number = [&] { return random() % 4 == 0 ? kUnlimited : random() % (64 * kGiB); };
  for (int i = 0; i < 5000; ++i) {
    ReportFacts facts;
    facts.driver.total_bytes = random() % (128 * kGiB);
    facts.driver.free_bytes = random() % (facts.driver.total_bytes + 1);
    facts.limit_bytes = number();
    facts.held_bytes = random() % (64 * kGiB);
    facts.reserve_bytes = random() % (2 * kGiB);
    facts.host_available_bytes = number();
    facts.host_share_bytes = facts.host_available_bytes;
    const MemoryNumbers truth = report_memory(facts, Report::kDevice);
    const MemoryNumbers free = report_memory(facts, Report::kFree);
    const MemoryNumbers total = report_memory(facts, Report::kTotal);
    for (const MemoryNumbers& told : {truth, free, total}) EXPECT_LE(told.free_bytes, told.total_bytes);
    EXPECT_LE(truth.free_bytes, facts.driver.free_bytes);
    EXPECT_LE(truth.total_bytes, facts.limit_bytes);
    EXPECT_LE(truth.free_bytes, saturating_subtract(facts.limit_bytes, facts.held_bytes));
    EXPECT_GE(free.free_bytes, truth.free_bytes);
    EXPECT_EQ(free.total_bytes, truth.total_bytes);
    EXPECT_GE(total.free_bytes, free.free_bytes);
    EXPECT_GE(total.total_bytes, truth.total_bytes);
  }
}

preload::CountedMemory::Entry entry_of(DeviceBudget& budget, uint64_t size_bytes) {
  return preload::CountedMemory::make_entry(budget.charge(0, size_bytes));
}

TEST(CountedMemory, WhatIsTakenOutGivesItsChargeBack) {
  DeviceBudget budget;
  preload::CountedMemory counted;
  counted.keep(100, entry_of(budget, 10));
  counted.keep(200, entry_of(budget, 20));
  EXPECT_EQ(budget.held_bytes(0), 30u);
  EXPECT_TRUE(counted.take(300).empty());
  {
    auto entry = counted.take(100);
    EXPECT_FALSE(entry.empty());
    EXPECT_EQ(budget.held_bytes(0), 30u);  // until the driver has freed it
    EXPECT_TRUE(counted.take(100).empty());
  }
  EXPECT_EQ(budget.held_bytes(0), 20u);
  EXPECT_EQ(counted.count(), 1u);
}

TEST(CountedMemory, WhatTheDriverDidNotFreeIsCountedOn) {
  DeviceBudget budget;
  preload::CountedMemory counted;
  counted.keep(100, entry_of(budget, 10));
  auto entry = counted.take(100);
  counted.keep(100, std::move(entry));
  EXPECT_EQ(budget.held_bytes(0), 10u);
  EXPECT_EQ(counted.count(), 1u);
}

TEST(CountedMemory, AnAddressThatComesAgainReplacesWhatWasFreedUnseen) {
  DeviceBudget budget;
  preload::CountedMemory counted;
  counted.keep(100, entry_of(budget, 10));
  counted.keep(100, entry_of(budget, 30));
  EXPECT_EQ(budget.held_bytes(0), 30u);
  EXPECT_EQ(counted.count(), 1u);
}

TEST(CountedMemory, AllCanBeTakenAtOnce) {
  DeviceBudget budget;
  preload::CountedMemory counted;
  counted.keep(100, entry_of(budget, 10));
  counted.keep(200, entry_of(budget, 20));
  EXPECT_TRUE(counted.has(100));
  EXPECT_FALSE(counted.has(101));
  {
    auto taken = counted.take_all();
    EXPECT_EQ(taken.size(), 2u);
    EXPECT_EQ(counted.count(), 0u);
    counted.keep(200, taken.extract(200));
  }
  EXPECT_TRUE(counted.has(200));
  EXPECT_EQ(budget.held_bytes(0), 20u);
}

TEST(CountedMemory, AnEntryThatIsNotKeptHoldsNothing) {
  DeviceBudget budget;
  {
    const auto entry = entry_of(budget, 10);
  }
  EXPECT_EQ(budget.held_bytes(0), 0u);
}

TEST(CountedMemory, ThreadsKeepAndTake) {
  DeviceBudget budget;
  preload::CountedMemory counted;
  std::vector<std::thread> threads;
  for (uint64_t number = 0; number < 4; ++number) {
    threads.emplace_back([&, number] {
      for (uint64_t i = 0; i < 500; ++i) {
        const uint64_t key = number * 1000 + i % 10;
        counted.keep(key, entry_of(budget, 8));
        if (i % 3 != 0) counted.take(key);
      }
      for (uint64_t i = 0; i < 10; ++i) counted.take(number * 1000 + i);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counted.count(), 0u);
  EXPECT_EQ(budget.held_bytes(0), 0u);
}

}  // namespace
}  // namespace ebbtide
