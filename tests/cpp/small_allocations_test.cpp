// Small allocations stay on the device when large ones spill: they may use the last part of the limit and half of the
// reserve.
#include "base/error.h"
#include "overflow_world.h"

namespace ebbtide::testing {
namespace {

constexpr uint64_t kSmall = policy::kSmallAllocationBytes;
constexpr uint64_t kLimit = 128 * kMiB;
constexpr uint64_t kRoom = 4 * kMiB;  // the part of that limit that is for small allocations

class SmallAllocations : public OverflowWorld {
 protected:
  SmallAllocations() { use_default_reserve(); }
  void use_default_reserve() { core().rules.overflow.reserve_bytes = OverflowRules::kDefaultReserve; }
  // The device has this much memory, and the reserve is 16 MiB of it.
  void make_device_small(uint64_t free_bytes) {
    sim().set_capacity(0, free_bytes);
    core().rules.overflow.reserve_bytes = 16 * kMiB;
  }
  uint64_t device_bytes_of(CUdeviceptr address) { return core().registry.find(address)->device_bytes(); }
  uint64_t place(const Policy& policy, uint64_t size_bytes) {
    return device_bytes_of(alloc_with("w", policy, size_bytes));
  }
};

TEST_F(SmallAllocations, TheLastOfTheLimitIsTheirs) {
  for (const Policy& policy : {kSplitRam, kSplitNone}) {
    start();
    use_default_reserve();
    core().budgets.device.set_limit(kLimit);
    EXPECT_EQ(place(policy, kLimit), kLimit - kRoom);
    EXPECT_EQ(place(policy, 2 * kSmall), 0u) << "more than a small one";
    EXPECT_EQ(place(policy, kSmall), kSmall);
    EXPECT_EQ(place(policy, kSmall), kSmall);
    EXPECT_EQ(place(policy, kSmall), 0u) << "out of that as well";
    EXPECT_EQ(core().budgets.device.available_bytes(0), 0u);
  }
}

TEST_F(SmallAllocations, WholeLeavesItToThemToo) {
  core().budgets.device.set_limit(2 * kLimit);
  EXPECT_EQ(place(kSplitRam, 2 * kLimit), 2 * kLimit - 2 * kRoom);
  EXPECT_EQ(place(kWholeRam, 2 * kSmall), 0u);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(place(kWholeRam, kSmall), kSmall);
  EXPECT_EQ(place(kWholeRam, kSmall), 0u) << "more than its share of the last 2 MiB";
}

TEST_F(SmallAllocations, HalfTheReserveIsTheirs) {
  for (const Policy& policy : {kSplitRam, kWholeRam}) {
    start();
    make_device_small(64 * kMiB);
    EXPECT_EQ(place(kSplitRam, 48 * kMiB), 48 * kMiB);
    EXPECT_EQ(place(policy, 2 * kSmall), 0u);
    const int fitting = policy.overflow == Overflow::kSplit ? 4 : 3;  // whole takes no more than its share of the last
    for (int i = 0; i < fitting; ++i) EXPECT_EQ(place(policy, kSmall), kSmall);
    EXPECT_EQ(place(policy, kSmall), 0u) << "the other half is for what allocates outside of regions";
    EXPECT_EQ(place(kSplitRam, kSmall), policy.overflow == Overflow::kSplit ? 0 : kSmall);
    EXPECT_EQ(free_device_bytes(0), 8 * kMiB);
  }
}

TEST_F(SmallAllocations, ATinyLimitHasNoRoomForThem) {
  core().budgets.device.set_limit(32 * kSmall - kSmall);
  EXPECT_EQ(place(kSplitRam, 32 * kSmall), 31 * kSmall);
  EXPECT_EQ(place(kSplitRam, kSmall), 0u);
}

TEST_F(SmallAllocations, WithoutAReserveAllIsForAll) {
  core().rules.overflow.reserve_bytes = 0;
  core().budgets.device.set_limit(kLimit);
  EXPECT_EQ(place(kSplitRam, kLimit), kLimit);
}

TEST_F(SmallAllocations, WithoutAPolicyTheLimitIsForAll) {
  core().budgets.device.set_limit(kLimit);
  EXPECT_EQ(place(Policy{}, kLimit), kLimit);
}

TEST_F(SmallAllocations, WhatFitsTheLimitIsNotRefusedForWantOfHostMemory) {
  for (const Policy& policy : {kSplitRam, kWholeRam}) {
    start();
    use_default_reserve();
    core().budgets.device.set_limit(kLimit);
    core().budgets.host.set_limit(0);
    EXPECT_EQ(place(policy, kLimit), kLimit);
    EXPECT_THROW(place(policy, kSmall), OutOfMemory);
    EXPECT_EQ(core().counters.spills, 0u);
  }
}

TEST_F(SmallAllocations, PromoteOfLargeOnesLeavesTheirRoom) {
  spill("w", kSplitRam, 0, 64 * kMiB);
  spill("w", kSplitRam, 0, 64 * kMiB);
  core().budgets.device.set_limit(kLimit);
  EXPECT_EQ(promote().totals().bytes, 64 * kMiB);
  EXPECT_EQ(place(kSplitRam, 64 * kMiB), 64 * kMiB - kRoom);
  EXPECT_EQ(promote().totals().bytes, 0u);
  EXPECT_EQ(place(kSplitRam, kSmall), kSmall);
}

TEST_F(SmallAllocations, PromoteOfASmallOneMayUseIt) {
  const size_t small = spill("w", kSplitRam, 0, kSmall);
  core().budgets.device.set_limit(kLimit);
  EXPECT_EQ(place(kSplitRam, kLimit), kLimit - kRoom);
  EXPECT_EQ(promote().totals().bytes, kSmall);
  EXPECT_EQ(host_bytes(small), 0u);
}

// When trimmed chunks come back, a small allocation finds the same room as a new one.
TEST_F(SmallAllocations, AResumeByRoomGoesByTheAllocationsSize) {
  const size_t large = spill("w", kSplitRam, 0, 2 * kSmall);
  const size_t small = spill("w", kSplitRam, 0, kSmall);
  const std::vector<CUdeviceptr> both = {items_[large].address, items_[small].address};
  core().budgets.device.set_limit(kLimit);
  EXPECT_EQ(place(kSplitRam, kLimit), kLimit - kRoom);
  trim({"w"}, both);
  EXPECT_EQ(resume_at({"w"}, both).totals().bytes, kSmall);
  EXPECT_EQ(host_bytes(large), 2 * kSmall);
  EXPECT_EQ(host_bytes(small), 0u);
}

TEST_F(SmallAllocations, AFlushIsAskedForWhenTheirRoomWouldBeNeeded) {
  Policy policy = kSplitRam;
  policy.flushes_first = true;
  core().budgets.device.set_limit(kLimit);
  EXPECT_TRUE(must_flush("w", policy, kLimit));
  EXPECT_EQ(place(policy, kLimit), kLimit - kRoom);
  EXPECT_EQ(place(policy, kSmall), kSmall) << "at once";
}

TEST_F(SmallAllocations, Invariant7_AClaimLeavesWhatItSpares) {
  DeviceBudget budget;
  budget.set_limit(100);
  const DeviceCharge first = budget.charge(0, 60, 40);
  EXPECT_THROW(budget.charge(0, 1, 40), OutOfMemory);
  EXPECT_THROW(budget.charge(0, 1, kUnlimited), OutOfMemory);
  const DeviceCharge second = budget.charge(0, 40);
  EXPECT_EQ(budget.available_bytes(0), 0u);
  budget.set_limit(kUnlimited);
  EXPECT_EQ(budget.charge(0, 7, kUnlimited).size_bytes(), 7u) << "an unlimited budget spares nothing";
}

}  // namespace
}  // namespace ebbtide::testing
