// Which allocations share a handle after they have come back, and which do not.
#include <gtest/gtest.h>

#include <cstring>

#include "driver/context.h"
#include "overflow_world.h"
#include "shared_fixture.h"

namespace ebbtide::testing {
namespace {

const Policy kRam = {BackupKind::kRam};

TEST_F(SharedTest, Invariant1_NeighboursComeBackBehindOneHandleAtTheirAddresses) {
  const auto parts = make("w", 5);
  EXPECT_EQ(handles(), 5u);
  for (size_t index = 1; index < parts.size(); ++index) EXPECT_EQ(parts[index], parts[index - 1] + kChunk);
  pause();
  EXPECT_EQ(handles(), 0u);
  expect_device_bytes(0);
  EXPECT_EQ(resume().totals().bytes, 5 * kChunk);
  EXPECT_EQ(handles(), 1u);
  expect_device_bytes(5 * kChunk);
  expect_whole(parts);
  for (int round = 0; round < 2; ++round) {
    for (const CUdeviceptr address : parts) write(address, kChunk);
    const Report report = pause();
    EXPECT_EQ(report.totals().bytes, 5 * kChunk);
    EXPECT_EQ(report.totals().copied, 5 * kChunk);
    EXPECT_EQ(report.remaining().size(), 0u);
    expect_device_bytes(0);
    resume();
    EXPECT_EQ(handles(), 1u);
    expect_whole(parts);
  }
  expect_no_leak();
}

TEST_F(SharedTest, ALaterAllocationStandsAloneUntilItHasBeenAway) {
  const auto parts = make("w", 2);
  come_back();
  const auto more = make("w", 2);
  EXPECT_EQ(handles(), 3u);
  come_back();
  EXPECT_EQ(handles(), 1u);
  expect_whole(parts);
  expect_whole(more);
}

TEST_F(SharedTest, TheChunksOfOneAllocationShareAsWell) {
  const CUdeviceptr address = alloc_chunks("w", kRam, 0, {kChunk, 3 * kChunk, kChunk});
  write(address, 5 * kChunk);
  const auto parts = make("w", 1);
  come_back();
  EXPECT_EQ(handles(), 1u);
  EXPECT_TRUE(is_whole(address));
  expect_whole(parts);
}

TEST_F(SharedTest, AGapAndTheCapEndAHandle) {
  auto parts = make("w", 5);
  deallocate(core(), parts[2]);
  parts.erase(parts.begin() + 2);
  come_back();
  EXPECT_EQ(handles(), 2u);
  expect_whole(parts);
  core().rules.shared_handle_bytes = 2 * kChunk - 1;
  come_back();
  EXPECT_EQ(handles(), 4u);
  core().rules.shared_handle_bytes = 2 * kChunk;
  come_back();
  EXPECT_EQ(handles(), 2u);
  core().rules.shared_handle_bytes = 0;
  come_back();
  EXPECT_EQ(handles(), 4u);
  expect_whole(parts);
}

TEST_F(SharedTest, OtherTagsDevicesAndPoliciesDoNotShare) {
  std::vector<std::vector<CUdeviceptr>> all;
  for (int round = 0; round < 2; ++round) {
    all.push_back(make("w", 1));
    all.push_back(make("other", 1));
    all.push_back(make("w", 1, kRam, 1));
  }
  come_back();
  EXPECT_EQ(handles(), 3u);
  const auto retained = make("w", 2, {BackupKind::kRam, true});
  all.push_back(retained);
  all.push_back(make("w", 1));
  come_back();
  EXPECT_EQ(handles(), 5u) << "three tags and devices, those that are retained, and the one behind them";
  for (const auto& parts : all) expect_whole(parts);
}

TEST_F(SharedTest, AllocationsFreedOneByOneDoNotShare) {
  for (const Policy& policy :
       {Policy{.overflow = Overflow::kSplit}, Policy{.overflow = Overflow::kWhole}, Policy{.is_freed_singly = true}}) {
    const auto parts = make("w", 3, policy);
    come_back();
    EXPECT_EQ(handles(), 3u);
    expect_whole(parts);
    free_all(parts);
  }
}

TEST_F(SharedTest, UnusedMemoryDoesNotShare) {
  for (const BackupKind kind : {BackupKind::kRam, BackupKind::kNone}) {
    const auto parts = make("w", 3);
    OperationRequest request;
    request.tags.names = {"w"};
    request.backup = kind;
    request.unused = AddressRanges({{parts[1], kChunk}});
    request.unused_as_of = core().registry.leases.newest();
    Operation::claim(core(), OperationKind::kPause, request)->commit();
    resume();
    EXPECT_EQ(handles(), 3u) << "a pool's idle memory lies in the middle";
    come_back();
    EXPECT_EQ(handles(), 1u) << "it is not known to be idle";
    for (const CUdeviceptr part : parts) deallocate(core(), part);
  }
}

TEST_F(SharedTest, AnIdlePartOfAnAllocationSharesWithTheRestOfIt) {
  const CUdeviceptr address = alloc_chunks("w", kRam, 0, {kChunk, kChunk, kChunk});
  fill(address + kChunk, kChunk, 1);
  come_back();
  EXPECT_EQ(handles(), 1u);
  EXPECT_TRUE(is_zero(address, kChunk));
  EXPECT_TRUE(holds(address + kChunk, kChunk, 1));
  EXPECT_TRUE(is_zero(address + 2 * kChunk, kChunk));
}

TEST_F(SharedTest, WhatWasDroppedSharesAndReadsAsZeros) {
  const auto parts = make("kv", 3, {BackupKind::kNone});
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(pause().totals().bytes, 3 * kChunk);
    EXPECT_EQ(resume().totals().bytes, 3 * kChunk);
    EXPECT_EQ(handles(), 1u);
    for (const CUdeviceptr address : parts) {
      EXPECT_TRUE(is_zero(address, kChunk));
      write(address, kChunk);
    }
  }
}

class SharedOverflowTest : public OverflowWorld {};

TEST_F(SharedOverflowTest, WhatLiesOnTheHostDoesNotShareWithWhatLiesBesideItOnTheDevice) {
  spill("w", kSplitNone, 2 * kChunk, 2 * kChunk);
  spill("w", kSplitNone, kChunk, kChunk);
  const uint64_t handles = Live::now().handles;
  pause();
  note_dropped();
  core().budgets.device.set_limit(3 * kChunk);
  resume();
  core().budgets.device.set_limit(kUnlimited);
  EXPECT_EQ(Live::now().handles, handles);
  EXPECT_EQ(host_bytes(0), 2 * kChunk);
  EXPECT_EQ(host_bytes(1), kChunk);
  expect_resident("back");
  free_all();
  expect_nothing_left();
}

}  // namespace
}  // namespace ebbtide::testing
