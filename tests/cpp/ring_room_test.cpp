// The room of the pinned ring: never handed out twice at once, always contiguous, and all of it usable.
#include "store/ring_room.h"

#include <gtest/gtest.h>

#include <deque>
#include <random>

namespace ebbtide::testing {
namespace {

TEST(RingRoom, GoesAroundAndGivesNothingTwice) {
  RingRoom room(10);
  EXPECT_EQ(room.take(4), 0u);
  EXPECT_EQ(room.take(4), 4u);
  EXPECT_EQ(room.take(4), std::nullopt) << "two at the end and none before";
  room.give_back();
  EXPECT_EQ(room.take(5), std::nullopt);
  EXPECT_EQ(room.take(4), 0u) << "in a row, so the two at the end stay unused";
  EXPECT_EQ(room.take(1), std::nullopt) << "it begins where the oldest begins";
  room.give_back();
  EXPECT_EQ(room.take(6), 4u);
  room.give_back();
  room.give_back();
  EXPECT_EQ(room.take(10), 0u) << "all of it, once nothing is taken";
  EXPECT_EQ(room.take(1), std::nullopt);
}

TEST(RingRoom, ARandomWalkNeverOverlapsAndNeverStarves) {
  constexpr size_t kSize = 64;
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    std::mt19937 random(seed);
    RingRoom room(kSize);
    struct Span {
      size_t begin, end;
    };
    std::deque<Span> taken;
    for (int step = 0; step < 500; ++step) {
      const size_t size = 1 + random() % (seed % 3 == 0 ? kSize : kSize / 4);
      if (const auto begin = room.take(size)) {
        ASSERT_LE(*begin + size, kSize);
        for (const Span& each : taken) ASSERT_TRUE(*begin + size <= each.begin || *begin >= each.end) << seed;
        taken.push_back({*begin, *begin + size});
      } else {
        ASSERT_FALSE(taken.empty()) << "an empty ring has room for everything";
        room.give_back();
        taken.pop_front();
      }
      if (!taken.empty() && random() % 3 == 0) {
        room.give_back();
        taken.pop_front();
      }
    }
  }
}

}  // namespace
}  // namespace ebbtide::testing
