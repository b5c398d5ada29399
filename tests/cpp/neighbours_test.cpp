// The decision which pieces of memory share a handle, without a driver.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "policy/chunking.h"

namespace ebbtide::policy {
namespace {

using Groups = std::vector<std::vector<size_t>>;

bool always(size_t, size_t) { return true; }

TEST(Neighbours, NothingIsNoGroup) {
  EXPECT_EQ(group_neighbours({}, kUnlimited, always), Groups{});
  EXPECT_EQ(group_neighbours({}, 0, always), Groups{});
}

TEST(Neighbours, WhatLiesSideBySideIsOneGroupAndAGapEndsIt) {
  EXPECT_EQ(group_neighbours({{10, 5}, {15, 1}, {16, 4}, {21, 3}, {24, 1}}, kUnlimited, always),
            (Groups{{0, 1, 2}, {3, 4}}));
}

TEST(Neighbours, TheOrderInWhichTheyAreNamedDoesNotMatter) {
  EXPECT_EQ(group_neighbours({{24, 1}, {16, 4}, {10, 5}, {21, 3}, {15, 1}}, kUnlimited, always),
            (Groups{{2, 4, 1}, {3, 0}}));
}

TEST(Neighbours, AGroupIsFullToTheByteAndAPieceThatIsLargerStandsAlone) {
  EXPECT_EQ(group_neighbours({{0, 4}, {4, 4}, {8, 1}, {9, 7}}, 8, always), (Groups{{0, 1}, {2, 3}}));
  EXPECT_EQ(group_neighbours({{0, 4}, {4, 9}, {13, 4}, {17, 4}}, 8, always), (Groups{{0}, {1}, {2, 3}}));
  EXPECT_EQ(group_neighbours({{0, 9}, {9, 9}}, 8, always), (Groups{{0}, {1}}));
}

TEST(Neighbours, WithoutRoomForTwoNoneShares) {
  for (const uint64_t most_bytes : {0, 1, 4, 7}) {
    EXPECT_EQ(group_neighbours({{0, 4}, {4, 4}, {8, 4}}, most_bytes, always), (Groups{{0}, {1}, {2}})) << most_bytes;
  }
}

TEST(Neighbours, WhoMayNotShareWithTheOneBeforeBeginsAnew) {
  const auto of_one_kind = [](size_t one, size_t other) { return one % 2 == other % 2; };
  // By address: 1, 3, 0, 2.
  EXPECT_EQ(group_neighbours({{20, 10}, {0, 10}, {30, 10}, {10, 10}}, kUnlimited, of_one_kind),
            (Groups{{1, 3}, {0, 2}}));
  EXPECT_EQ(group_neighbours({{0, 1}, {1, 1}}, kUnlimited, [](size_t, size_t) { return false; }), (Groups{{0}, {1}}));
}

TEST(Neighbours, OnlyThoseThatLieSideBySideAreAskedAbout) {
  std::set<std::pair<size_t, size_t>> asked;
  group_neighbours({{0, 1}, {1, 1}, {3, 1}, {4, 1}}, kUnlimited, [&](size_t one, size_t other) {
    asked.emplace(one, other);
    return true;
  });
  EXPECT_EQ(asked, (std::set<std::pair<size_t, size_t>>{{0, 1}, {2, 3}}));
}

TEST(Neighbours, EveryPieceIsInOneGroupWhateverTheSizes) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    std::vector<Extent> pieces;
    uint64_t address = 0;
    for (uint64_t count = random() % 30; count > 0; --count) {
      address += random() % 3 == 0 ? 1 + random() % 4 : 0;
      pieces.push_back({address, 1 + random() % 6});
      address += pieces.back().size_bytes;
    }
    std::shuffle(pieces.begin(), pieces.end(), random);
    const uint64_t most_bytes = random() % 20;
    const auto may_share = [](size_t one, size_t other) { return (one * 31 + other * 17) % 5 != 0; };
    const Groups groups = group_neighbours(pieces, most_bytes, may_share);
    std::vector<int> times(pieces.size(), 0);
    const std::vector<size_t>* before = nullptr;
    for (const std::vector<size_t>& group : groups) {
      uint64_t bytes = 0;
      for (size_t index = 0; index < group.size(); ++index) {
        const Extent& piece = pieces[group[index]];
        ++times[group[index]];
        bytes += piece.size_bytes;
        if (index == 0) continue;
        const Extent& last = pieces[group[index - 1]];
        EXPECT_EQ(last.address + last.size_bytes, piece.address);
        EXPECT_TRUE(may_share(group[index - 1], group[index]));
      }
      EXPECT_TRUE(group.size() == 1 || bytes <= most_bytes);
      if (before != nullptr) {
        // The group before has taken everything that could join it.
        const Extent& last = pieces[before->back()];
        const Extent& first = pieces[group.front()];
        uint64_t joined_bytes = first.size_bytes;
        for (const size_t number : *before) joined_bytes += pieces[number].size_bytes;
        EXPECT_TRUE(last.address + last.size_bytes < first.address || joined_bytes > most_bytes ||
                    !may_share(before->back(), group.front()));
      }
      before = &group;
    }
    EXPECT_TRUE(std::all_of(times.begin(), times.end(), [](int count) { return count == 1; }));
  }
}

}  // namespace
}  // namespace ebbtide::policy
