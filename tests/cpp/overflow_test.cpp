// What spills, where it is, and how every operation treats it.
#include <thread>

#include "base/error.h"
#include "core/operation/backup_view.h"
#include "overflow_world.h"

namespace ebbtide::testing {
namespace {

using OverflowTest = OverflowWorld;

TEST_F(OverflowTest, WhatFitsDoesNotSpill) {
  const size_t item = spill("w", kSplitRam, 4 * kChunk, 0);
  EXPECT_EQ(host_bytes(item), 0u);
  EXPECT_EQ(core().counters.spills, 0u);
  expect_resident("made");
}

TEST_F(OverflowTest, ASplitAllocationBeginsOnTheDevice) {
  const size_t item = spill("w", kSplitRam, 2 * kChunk, 3 * kChunk);
  EXPECT_EQ(device_bytes(item), 2 * kChunk);
  EXPECT_EQ(host_bytes(item), 3 * kChunk);
  EXPECT_EQ(find(item).chunks.front().place.load(), Place::kDevice);
  EXPECT_EQ(find(item).chunks.back().place.load(), Place::kHost);
  EXPECT_EQ(core().counters.spills, 1u);
  EXPECT_EQ(core().counters.bytes_spilled, 3 * kChunk);
  expect_resident("made");
  free_all();
  expect_nothing_left();
}

TEST_F(OverflowTest, NewMemoryReadsAsZerosOnBothSides) {
  core().host_pool.set_capacity(8 * kChunk);
  for (int round = 0; round < 2; ++round) {
    core().budgets.device.set_limit(kChunk);
    const CUdeviceptr address = alloc_with("w", kSplitNone, 4 * kChunk);
    EXPECT_TRUE(is_zero(address, 4 * kChunk)) << "round " << round;
    fill(address, 4 * kChunk, 77);
    deallocate(core(), address);
  }
  EXPECT_EQ(core().host_pool.kept_bytes(), 3 * kChunk);
}

TEST_F(OverflowTest, TheReserveStaysFree) {
  sim().set_capacity(0, 16 * kChunk);
  core().rules.overflow.reserve_bytes = 6 * kChunk;
  alloc_with("w", kSplitRam, 32 * kChunk);
  EXPECT_EQ(free_device_bytes(0), 6 * kChunk);
  // Without an overflow policy, an allocation may use the reserve.
  alloc_with("plain", Policy{}, 6 * kChunk);
  EXPECT_EQ(free_device_bytes(0), 0u);
}

TEST_F(OverflowTest, TheDefaultReserveIsASixteenthOfASmallDevice) {
  sim().set_capacity(0, 64 * kChunk);
  core().rules.overflow.reserve_bytes = OverflowRules::kDefaultReserve;
  alloc_with("w", kSplitRam, 64 * kChunk);
  EXPECT_EQ(free_device_bytes(0), 4 * kChunk);
}

TEST_F(OverflowTest, OtherProcessesCount) {
  sim().set_capacity(0, 16 * kChunk);
  sim().set_foreign_bytes(0, 15 * kChunk);
  const CUdeviceptr address = alloc_with("w", kSplitRam, 4 * kChunk);
  EXPECT_EQ(core().registry.find(address)->device_bytes(), kChunk);
}

TEST_F(OverflowTest, WholeGoesByTheShareOfWhatIsFree) {
  core().budgets.device.set_limit(10 * kChunk);
  EXPECT_EQ(core().registry.find(alloc_with("w", kWholeRam, 7 * kChunk))->device_bytes(), 0u);
  EXPECT_EQ(core().registry.find(alloc_with("w", kWholeRam, 6 * kChunk))->host_bytes(), 0u);
  EXPECT_EQ(core().registry.find(alloc_with("w", kWholeRam, 3 * kChunk))->device_bytes(), 0u);
  EXPECT_EQ(core().registry.find(alloc_with("w", kWholeRam, 2 * kChunk))->host_bytes(), 0u);
}

TEST_F(OverflowTest, WholeLiesOnTheDeviceWhereTheHostRefuses) {
  core().budgets.device.set_limit(10 * kChunk);
  core().budgets.host.set_limit(kChunk);
  EXPECT_EQ(core().registry.find(alloc_with("w", kWholeRam, 10 * kChunk))->device_bytes(), 10 * kChunk);
  EXPECT_THROW(alloc_with("w", kWholeRam, 2 * kChunk), OutOfMemory);
  EXPECT_EQ(core().counters.spills, 0u);
}

TEST_F(OverflowTest, WithoutAPolicyItIsOutOfMemory) {
  core().budgets.device.set_limit(kChunk);
  EXPECT_THROW(alloc_with("w", Policy{}, 2 * kChunk), OutOfMemory);
}

TEST_F(OverflowTest, MemoryThatGoesBetweenTheLookAndTheCallSpillsToo) {
  sim().fail("cuMemCreate", 1, kOutOfMemory, 1);
  const CUdeviceptr address = alloc_with("w", kSplitRam, kChunk);
  EXPECT_EQ(core().registry.find(address)->host_bytes(), 0u) << "one refusal is looked at again";
  sim().clear_failures();
  sim().set_capacity(0, 4 * kChunk);
  sim().fail("cuMemCreate", 1, kOutOfMemory, 2);
  const CUdeviceptr other = alloc_with("w", kSplitRam, kChunk);
  EXPECT_EQ(core().registry.find(other)->device_bytes(), 0u);
}

TEST_F(OverflowTest, FlushesFirstIsRefusedOnceForEachSpill) {
  Policy policy = kSplitRam;
  policy.flushes_first = true;
  core().budgets.device.set_limit(4 * kChunk);
  EXPECT_NE(alloc_with("w", policy, 4 * kChunk), 0u) << "what fits is not refused";
  for (int round = 0; round < 2; ++round) {
    EXPECT_TRUE(must_flush("w", policy, 2 * kChunk));
    EXPECT_NE(alloc_with("w", policy, 2 * kChunk), 0u);
  }
  // Another size, tag or thread is another call.
  EXPECT_TRUE(must_flush("w", policy, 2 * kChunk));
  EXPECT_TRUE(must_flush("w", policy, 3 * kChunk));
  EXPECT_TRUE(must_flush("v", policy, 3 * kChunk));
  std::thread([&] { EXPECT_TRUE(must_flush("v", policy, 3 * kChunk)); }).join();
  EXPECT_NE(alloc_with("v", policy, 3 * kChunk), 0u);
  EXPECT_EQ(core().counters.alloc_failures, 0u) << "a call that will be made again did not fail";
}

TEST_F(OverflowTest, DuringACaptureNobodyAsksAgain) {
  Policy policy = kSplitRam;
  policy.flushes_first = true;
  core().budgets.device.set_limit(0);
  core().capture_gate.begin_capture();
  EXPECT_NE(alloc_with("w", policy, kChunk), 0u);
  core().capture_gate.end_capture();
  EXPECT_TRUE(must_flush("w", policy, kChunk));
}

TEST_F(OverflowTest, Invariant7_TheHostLimitHolds) {
  core().budgets.device.set_limit(kChunk);
  core().budgets.host.set_limit(4 * kChunk);
  const CUdeviceptr first = alloc_with("w", kSplitRam, 4 * kChunk);
  EXPECT_EQ(core().budgets.host.held_bytes(), 3 * kChunk);
  try {
    alloc_with("w", kSplitRam, 2 * kChunk);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.shortage.requested_bytes, 2 * kChunk);
    EXPECT_EQ(error.shortage.limit_bytes, 4 * kChunk);
  }
  EXPECT_EQ(core().budgets.host.held_bytes(), 3 * kChunk);
  deallocate(core(), first);
  EXPECT_EQ(core().budgets.host.held_bytes(), 0u);
}

TEST_F(OverflowTest, AHostWithoutMemoryIsOutOfMemory) {
  core().budgets.device.set_limit(0);
  deallocate(core(), alloc_with("w", kSplitRam, kChunk));
  sim().fail("cuMemCreate", 1, kOutOfMemory, 0);
  ::testing::internal::CaptureStderr();
  EXPECT_THROW(alloc_with("w", kSplitRam, kChunk), OutOfMemory);
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("the system makes no"), std::string::npos);
  sim().clear_failures();
  EXPECT_EQ(core().budgets.host.held_bytes(), 0u);
}

TEST_F(OverflowTest, WithoutHostMemoryOfTheDriversNothingSpills) {
  sim().fail("cuMemCreate", 1, CUDA_ERROR_INVALID_DEVICE, 0);
  EXPECT_FALSE(host_location(0).has_value());
  core().budgets.device.set_limit(0);
  EXPECT_THROW(alloc_with("w", kSplitRam, kChunk), OutOfMemory);
  sim().clear_failures();
  EXPECT_NE(alloc_with("w", kSplitRam, kChunk), 0u) << "an answer of no is asked for again";
}

TEST_F(OverflowTest, ANodeThatIsFullNowIsStillThePlace) {
  sim().fail("cuMemCreate", 1, kOutOfMemory, 1);
  EXPECT_EQ(host_location(0)->where.type, CU_MEM_LOCATION_TYPE_HOST_NUMA);
}

TEST_F(OverflowTest, WhereTheNodeRefusesTheHostAtLargeServes) {
  if (is_hip()) GTEST_SKIP() << "HIP does not tell of host memory at large";
  sim().fail("cuMemCreate", 1, CUDA_ERROR_NOT_SUPPORTED, 1);
  const HostProbe probe = probe_host_location(0);
  ASSERT_TRUE(probe.location.has_value());
  EXPECT_EQ(probe.location->where.type, CU_MEM_LOCATION_TYPE_HOST);
  EXPECT_TRUE(probe.found.starts_with("host memory of any node (on NUMA node 0: ")) << probe.found;
  EXPECT_NE(probe.found.find("CUDA_ERROR_NOT_SUPPORTED"), std::string::npos);
}

TEST_F(OverflowTest, ThePoolKeepsWhatWasFreedUpToItsSize) {
  core().host_pool.set_capacity(3 * kChunk);
  const size_t first = spill("w", kSplitRam, 0, 2 * kChunk);
  spill("w", kSplitRam, 0, 2 * kChunk);
  deallocate(core(), items_[first].address);
  items_.erase(items_.begin());
  EXPECT_EQ(core().host_pool.kept_bytes(), 2 * kChunk);
  const uint64_t creations = sim().calls("cuMemCreate");
  const CUdeviceptr again = [&] {
    core().budgets.device.set_limit(0);
    return alloc_with("v", kSplitNone, 2 * kChunk);
  }();
  EXPECT_EQ(sim().calls("cuMemCreate"), creations) << "kept memory serves";
  EXPECT_TRUE(is_zero(again, 2 * kChunk)) << "Invariant 2";
  deallocate(core(), again);
  free_all();
  EXPECT_EQ(core().host_pool.kept_bytes(), 2 * kChunk) << "beyond the size it goes to the system";
  core().host_pool.set_capacity(0);
  expect_nothing_left();
  EXPECT_EQ(core().budgets.host.held_bytes(), 0u);
}

TEST_F(OverflowTest, ThePoolIsFilledAheadAndGivesWayToWhatFitsNoOtherWay) {
  core().host_pool.set_capacity(130 * kMiB);
  core().host_pool.fill(0);
  EXPECT_EQ(core().host_pool.kept_bytes(), 128 * kMiB);
  core().budgets.host.set_limit(128 * kMiB);
  core().budgets.device.set_limit(0);
  EXPECT_NE(alloc_with("w", kSplitRam, 6 * kChunk), 0u);
  EXPECT_EQ(core().host_pool.kept_bytes(), 64 * kMiB);
}

TEST_F(OverflowTest, ThePoolIsFilledForSmallSegmentsToo) {
  core().host_pool.set_capacity(512 * kMiB);
  core().host_pool.fill(0);
  EXPECT_EQ(core().host_pool.kept_bytes(), 512 * kMiB);
  core().host_pool.fill(0);
  EXPECT_EQ(core().host_pool.kept_bytes(), 512 * kMiB);
  const uint64_t creations = sim().calls("cuMemCreate");
  core().budgets.device.set_limit(0);
  for (const uint64_t size_bytes : {20 * kMiB, 2 * kMiB, 20 * kMiB, 2 * kMiB, 20 * kMiB, 128 * kMiB}) {
    EXPECT_NE(alloc_with("w", kSplitRam, size_bytes), 0u);
  }
  EXPECT_EQ(sim().calls("cuMemCreate"), creations) << "kept memory serves all of them";
  EXPECT_EQ(core().host_pool.kept_bytes(), 320 * kMiB);
}

TEST_F(OverflowTest, ThePoolGivesUpNoMoreThanIsMissing) {
  core().host_pool.set_capacity(192 * kMiB);
  core().host_pool.fill(0);
  core().budgets.host.set_limit(196 * kMiB);
  core().budgets.device.set_limit(0);
  EXPECT_NE(alloc_with("w", kSplitRam, 6 * kMiB), 0u);
  EXPECT_EQ(core().host_pool.kept_bytes(), 128 * kMiB);
  core().budgets.host.set_limit(20 * kMiB);
  EXPECT_NE(alloc_with("w", kSplitRam, 6 * kMiB), 0u) << "short of more than it says";
  EXPECT_EQ(core().host_pool.kept_bytes(), 0u);
}

TEST_F(OverflowTest, ThePoolGivesWayToABackupAndToPreparedMemory) {
  const CUdeviceptr address = alloc_with("w", {BackupKind::kRam}, 8 * kChunk);
  fill(address, 8 * kChunk, 1);
  core().host_pool.set_capacity(128 * kMiB);
  core().host_pool.fill(0);
  core().budgets.host.set_limit(core().budgets.host.held_bytes());
  EXPECT_EQ(pause().totals().copied, 8 * kChunk) << "the ring and the backup have the pool's room";
  EXPECT_LT(core().host_pool.kept_bytes(), 128 * kMiB);
  resume();
  EXPECT_TRUE(holds(address, 8 * kChunk, 1));
  core().engines.trim();
  core().budgets.host.set_limit(kUnlimited);
  core().host_pool.fill(0);
  core().budgets.host.set_limit(128 * kMiB);
  claim(OperationKind::kPrepare)->commit();
  EXPECT_LT(core().host_pool.kept_bytes(), 128 * kMiB);
  deallocate(core(), address);
}

TEST_F(OverflowTest, Invariant7_WhatThePoolCannotGiveIsRefusedWithTheNumbersThatAreLeft) {
  alloc_with("w", {BackupKind::kRam}, 8 * kChunk);
  core().host_pool.set_capacity(128 * kMiB);
  core().host_pool.fill(0);
  core().budgets.host.set_limit(4 * kChunk);
  try {
    pause();
    FAIL();
  } catch (const StoreError& error) {
    EXPECT_EQ(error.shortage.free_bytes, 4 * kChunk);
  }
  EXPECT_EQ(core().host_pool.kept_bytes(), 0u);
  EXPECT_EQ(resident_bytes("w"), 8 * kChunk);
}

TEST_F(OverflowTest, APoolBeyondTheMachineIsRefusedAndTheOldSizeStays) {
  core().host_pool.set_capacity(kGiB);
  EXPECT_THROW(core().host_pool.set_capacity(100ull << 40), InvalidArgument);
  EXPECT_EQ(core().host_pool.capacity_bytes(), kGiB);
}

TEST_F(OverflowTest, FillStopsWhereTheBudgetEnds) {
  core().budgets.host.set_limit(70 * kMiB);
  core().host_pool.set_capacity(kGiB);
  EXPECT_THROW(core().host_pool.fill(0), StoreError);
  EXPECT_EQ(core().host_pool.kept_bytes(), 64 * kMiB);
}

}  // namespace
}  // namespace ebbtide::testing
