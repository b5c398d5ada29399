#include "core/memory/address_ranges.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "core/allocate/flush_first.h"

namespace ebbtide::testing {
namespace {

TEST(AddressRangesTest, TheyAreSortedWhereTheyAreMade) {
  const AddressRanges ranges({{300, 10}, {100, 10}, {200, 10}});
  ASSERT_EQ(ranges.all().size(), 3u);
  EXPECT_EQ(ranges.all()[0].address, 100u);
  EXPECT_EQ(ranges.all()[2].address, 300u);
}

TEST(AddressRangesTest, OverlapsAreRefusedAlsoBetweenTwo) {
  EXPECT_THROW(AddressRanges({{100, 11}, {110, 10}}), InvalidArgument);
  EXPECT_EQ(AddressRanges({{110, 10}, {100, 10}}).all().size(), 2u) << "side by side is no overlap";
  const AddressRanges one({{100, 10}, {300, 10}});
  EXPECT_EQ(AddressRanges(one, AddressRanges({{200, 10}})).all()[1].address, 200u);
  EXPECT_THROW(AddressRanges(one, AddressRanges({{305, 10}})), InvalidArgument);
}

TEST(AddressRangesTest, ABlockIsCoveredOnlyAsAWhole) {
  const AddressRanges ranges({{90, 25}, {120, 20}, {155, 100}});
  const std::vector<bool> expected = {true, false, true, true, false, false, true, true};
  EXPECT_EQ(ranges.covered_blocks({100, 80}, 10), expected);
  EXPECT_EQ(AddressRanges().covered_blocks({100, 20}, 10), std::vector<bool>(2, false));
}

TEST(FlushFirstTest, OnlyTheVeryNextCallIsTheSecond) {
  FlushFirst memory;
  const FlushFirst::Call call{nullptr, 0, 10};
  EXPECT_FALSE(memory.is_second(call));
  memory.note_refused(call);
  EXPECT_FALSE(memory.is_second({nullptr, 0, 11}));
  EXPECT_FALSE(memory.is_second(call)) << "another call came between";
  memory.note_refused(call);
  EXPECT_TRUE(memory.is_second(call));
  EXPECT_FALSE(memory.is_second(call));
}

}  // namespace
}  // namespace ebbtide::testing
