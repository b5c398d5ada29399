// The order in which weights are expected to be used.
#include "policy/lms/use_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "policy/lms/eviction.h"

namespace ebbtide::policy {
namespace {

std::vector<uint64_t> forward(uint64_t count) {
  std::vector<uint64_t> uses(count);
  for (uint64_t unit = 0; unit < count; ++unit) uses[unit] = unit;
  return uses;
}

std::vector<uint64_t> forward_and_backward(uint64_t count) {
  std::vector<uint64_t> uses = forward(count);
  for (uint64_t unit = count; unit-- > 0;) uses.push_back(unit);
  return uses;
}

// How many uses find their unit away, in rounds after the first one, with room for so many units.
template <typename Choose>
size_t misses(const std::vector<uint64_t>& round, size_t rounds, size_t room, Choose choose) {
  std::vector<uint64_t> all;
  for (size_t turn = 0; turn < rounds; ++turn) all.insert(all.end(), round.begin(), round.end());
  std::vector<uint64_t> here;
  size_t missed = 0;
  for (size_t now = 0; now < all.size(); ++now) {
    if (std::find(here.begin(), here.end(), all[now]) == here.end()) {
      missed += now >= round.size() ? 1 : 0;
      if (here.size() == room) here.erase(here.begin() + static_cast<std::ptrdiff_t>(choose(all, now, here)));
      here.push_back(all[now]);
    }
  }
  return missed;
}

size_t misses_of_order(const std::vector<uint64_t>& round, size_t rounds, size_t room) {
  UseOrder order;
  size_t seen = 0;
  return misses(round, rounds, room, [&](const std::vector<uint64_t>& all, size_t now, const auto& here) {
    for (; seen <= now; ++seen) order.used(all[seen]);
    std::vector<Evictable> candidates;
    for (const uint64_t unit : here) candidates.push_back({1, eviction_order(order, unit, true)});
    return choose_evictions(candidates, 1).front();
  });
}

// Belady's choice, who knows the future.
size_t least_misses(const std::vector<uint64_t>& round, size_t rounds, size_t room) {
  return misses(round, rounds, room, [](const std::vector<uint64_t>& all, size_t now, const auto& here) {
    size_t farthest = 0, chosen = 0;
    for (size_t index = 0; index < here.size(); ++index) {
      const auto next = std::find(all.begin() + static_cast<std::ptrdiff_t>(now) + 1, all.end(), here[index]);
      const auto distance = static_cast<size_t>(next - all.begin());
      if (distance > farthest) farthest = distance, chosen = index;
    }
    return chosen;
  });
}

TEST(UseOrder, NothingIsKnownAtFirst) {
  UseOrder order;
  EXPECT_TRUE(order.is_empty());
  EXPECT_FALSE(order.next_use(1));
  order.used(1);
  EXPECT_FALSE(order.next_use(1));
  EXPECT_EQ(order.last_use(1), 0u);
  EXPECT_FALSE(order.last_use(2));
}

TEST(UseOrder, WhatFollowedBeforeIsExpectedAgain) {
  UseOrder order;
  for (const uint64_t unit : {1, 2, 3, 4, 1}) order.used(unit);
  EXPECT_EQ(order.next_use(2), 0u);
  EXPECT_EQ(order.next_use(4), 2u);
  EXPECT_EQ(order.next_use(1), 3u) << "it was just used";
  order.used(3);  // it skips one
  EXPECT_EQ(order.next_use(4), 0u);
  EXPECT_EQ(order.next_use(1), 1u);
}

TEST(UseOrder, AUseIsToldByWhatCameBefore) {
  UseOrder order;
  for (const uint64_t unit : {1, 9, 2, 3, 9, 4, 1, 9}) order.used(unit);
  EXPECT_EQ(order.next_use(2), 0u);
  for (const uint64_t unit : {2, 3, 9}) order.used(unit);
  EXPECT_EQ(order.next_use(4), 0u);
}

TEST(UseOrder, AUnitThatIsUsedTwiceInARowIsUsedOnce) {
  UseOrder order;
  for (const uint64_t unit : {1, 1, 2, 2, 1, 1}) order.used(unit);
  EXPECT_EQ(order.next_use(2), 0u);
  EXPECT_EQ(order.last_use(2), 1u);
}

TEST(UseOrder, WithoutAnOrderBackwardIsExpectedInReverse) {
  UseOrder order;
  for (const uint64_t unit : {1, 2, 3}) order.used(unit);
  EXPECT_GT(eviction_order(order, 1, true), eviction_order(order, 3, true));
  EXPECT_LT(eviction_order(order, 1, false), eviction_order(order, 3, false));
  EXPECT_GT(eviction_order(order, 7, true), eviction_order(order, 1, true));
  EXPECT_GT(eviction_order(order, 7, false), eviction_order(order, 3, false));
}

// The first round chooses without an order, which costs a little in each round.
TEST(UseOrder, RoundsThatRepeatAreServedAlmostAsIfTheFutureWereKnown) {
  for (const auto& round : {forward(20), forward_and_backward(20)}) {
    for (const size_t room : {2, 5, 13, 19}) {
      const size_t least = least_misses(round, 10, room);
      EXPECT_LE(misses_of_order(round, 10, room), least + least / 8 + 1) << room;
    }
  }
}

TEST(UseOrder, RandomUsesOfAnyLengthKeepItWhole) {
  std::mt19937_64 random(5);
  UseOrder order;
  std::set<uint64_t> units;
  for (int use = 0; use < 300'000; ++use) {
    const uint64_t unit = random() % 50;
    units.insert(unit);
    order.used(unit);
    ASSERT_EQ(order.last_use(unit), 0u);
    if (use % 1000 == 0) {
      for (const uint64_t each : units) ASSERT_GE(eviction_order(order, each, true), order.next_use(each).value_or(0));
    }
  }
}

}  // namespace
}  // namespace ebbtide::policy
