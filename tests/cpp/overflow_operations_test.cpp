// Operations on allocations that are partly or wholly on the host.
#include "base/error.h"
#include "core/operation/backup_view.h"
#include "overflow_world.h"

namespace ebbtide::testing {
namespace {

using OverflowTest = OverflowWorld;

TEST_F(OverflowTest, APauseWithABackupLeavesHostChunksWhereTheyAre) {
  const size_t item = spill("w", kSplitRam, 2 * kChunk, 3 * kChunk);
  const Report report = pause();
  EXPECT_EQ(report.totals().bytes, 2 * kChunk) << "device bytes only";
  EXPECT_EQ(report.totals().copied, 2 * kChunk);
  EXPECT_EQ(host_bytes(item), 3 * kChunk);
  EXPECT_FALSE(is_partial("w"));
  EXPECT_TRUE(report.remaining().empty()) << "nothing is left on the device";
  expect_sound("paused");
  EXPECT_EQ(pause().totals().bytes, 0u);
  EXPECT_EQ(resume().totals().bytes, 2 * kChunk);
  expect_resident("resumed");
  EXPECT_EQ(host_bytes(item), 3 * kChunk);
}

TEST_F(OverflowTest, WhatLiesOnTheHostAloneNeedsNoBackup) {
  spill("w", kSplitRam, 0, 2 * kChunk);
  core().budgets.host.set_limit(2 * kChunk);
  EXPECT_EQ(pause().totals().bytes, 0u);
  EXPECT_EQ(claim(OperationKind::kPrepare)->commit().front().totals().bytes, 0u);
  expect_resident("paused");
  resume();
}

TEST_F(OverflowTest, APauseWithoutABackupDropsHostChunksIntoThePool) {
  core().host_pool.set_capacity(8 * kChunk);
  const size_t item = spill("w", kSplitNone, 2 * kChunk, 3 * kChunk);
  EXPECT_EQ(pause().totals().bytes, 2 * kChunk);
  EXPECT_EQ(host_bytes(item), 0u);
  EXPECT_EQ(core().host_pool.kept_bytes(), 3 * kChunk);
  expect_sound("paused");
  // Host chunks of 2 and 1: there is room for the smaller one.
  core().budgets.device.set_limit(3 * kChunk);
  EXPECT_EQ(resume().totals().bytes, 3 * kChunk);
  EXPECT_EQ(host_bytes(item), 2 * kChunk);
  EXPECT_EQ(core().host_pool.kept_bytes(), kChunk);
  expect_resident("resumed, as zeros");
}

TEST_F(OverflowTest, AResumeWithoutHostRoomMovesNothing) {
  spill("w", kSplitNone, kChunk, 2 * kChunk);
  pause();
  core().budgets.device.set_limit(kChunk);
  core().budgets.host.set_limit(kChunk);
  EXPECT_THROW(resume(), StoreError);
  expect_sound("refused");
  core().budgets.host.set_limit(kUnlimited);
  resume();
  expect_resident("resumed");
}

TEST_F(OverflowTest, ASwapCountsDeviceMemoryOnly) {
  spill("out", kSplitRam, 2 * kChunk, kChunk);
  spill("in", kSplitNone, 2 * kChunk, kChunk);
  pause({"in"});
  note_dropped();
  core().budgets.device.set_limit(2 * kChunk);
  OperationRequest request;
  request.tags.names = {"out"};
  request.resume_tags.names = {"in"};
  const auto reports = Operation::claim(core(), OperationKind::kSwap, std::move(request))->commit();
  EXPECT_EQ(reports.front().totals().bytes, 2 * kChunk);
  EXPECT_EQ(reports.back().totals().bytes, 2 * kChunk);
  expect_sound("swapped");
  pause({"in"});
  note_dropped();
  resume({"out"});
  core().budgets.device.set_limit(kUnlimited);
  resume();
  expect_resident("all back");
}

TEST_F(OverflowTest, PromoteMovesWhatThereIsRoomFor) {
  const size_t first = spill("w", kSplitRam, kChunk, 3 * kChunk);  // host chunks of 2 and 1
  const size_t second = spill("w", kSplitRam, 0, 2 * kChunk);
  core().budgets.device.set_limit(core().budgets.device.held_bytes(0) + 3 * kChunk);
  const Report report = promote({"w"});
  EXPECT_EQ(report.totals().bytes, 3 * kChunk);
  EXPECT_EQ(report.totals().copied, 3 * kChunk);
  EXPECT_EQ(host_bytes(first), 0u);
  EXPECT_EQ(host_bytes(second), 2 * kChunk);
  expect_resident("promoted in part");
  EXPECT_EQ(promote().totals().bytes, 0u);
  core().budgets.device.set_limit(kUnlimited);
  EXPECT_EQ(promote().totals().bytes, 2 * kChunk);
  EXPECT_EQ(spilled_bytes(), 0u);
  EXPECT_EQ(core().budgets.host.held_bytes(), 0u);
  EXPECT_EQ(core().counters.bytes_promoted, 5 * kChunk);
  expect_resident("promoted");
  pause();
  EXPECT_EQ(resume().totals().bytes, 6 * kChunk) << "it comes back on the device";
  expect_resident("resumed");
}

TEST_F(OverflowTest, PromoteRespectsTheReserve) {
  sim().set_capacity(0, 8 * kChunk);
  spill("w", kSplitRam, 0, 4 * kChunk);
  core().rules.overflow.reserve_bytes = 6 * kChunk;
  EXPECT_EQ(promote().totals().bytes, 0u);
  core().rules.overflow.reserve_bytes = 4 * kChunk;
  EXPECT_EQ(promote().totals().bytes, 4 * kChunk);
}

TEST_F(OverflowTest, PromotedHostMemoryGoesToThePoolCleared) {
  core().host_pool.set_capacity(4 * kChunk);
  spill("w", kSplitRam, kChunk, 2 * kChunk);
  promote();
  EXPECT_EQ(core().host_pool.kept_bytes(), 2 * kChunk);
  core().budgets.device.set_limit(0);
  EXPECT_TRUE(is_zero(alloc_with("v", kSplitRam, 2 * kChunk), 2 * kChunk));
}

TEST_F(OverflowTest, PromoteRefusesALeasedTag) {
  spill("w", kSplitRam, 0, kChunk);
  const LeaseInfo lease = open_lease(core(), "w", "somebody");
  EXPECT_THROW(promote({"w"}), StateError);
  core().registry.leases.close(lease.id);
  EXPECT_EQ(promote({"w"}).totals().bytes, kChunk);
}

TEST_F(OverflowTest, WhatWasTrimmedComesBackOnTheDeviceIfThereIsRoom) {
  const size_t item = spill("w", kSplitRam, kChunk, 2 * kChunk);
  const CUdeviceptr address = items_[item].address;
  for (const bool has_room : {false, true}) {
    EXPECT_EQ(trim({"w"}, {address}).totals().bytes, kChunk);
    expect_sound("trimmed");
    EXPECT_EQ(host_bytes(item), 0u);
    core().budgets.device.set_limit((has_room ? 3 : 1) * kChunk);
    EXPECT_EQ(resume_at({"w"}, {address}).totals().bytes, (has_room ? 3 : 1) * kChunk);
    EXPECT_EQ(host_bytes(item), has_room ? 0 : 2 * kChunk);
    expect_resident("back");
  }
  // The dropped memory comes back as a new allocation would: a chunk on the device, and the rest spills.
  trim({"w"}, {address});
  core().budgets.device.set_limit(2 * kChunk);
  EXPECT_EQ(resume_at({"w"}, {address}).totals().bytes, kChunk);
  EXPECT_EQ(host_bytes(item), 2 * kChunk);
  core().budgets.device.set_limit(kUnlimited);
  EXPECT_EQ(promote().totals().bytes, 2 * kChunk);
  pause({}, BackupKind::kNone);
  core().budgets.device.set_limit(2 * kChunk);
  EXPECT_THROW(resume(), OutOfMemory) << "memory dropped on the device comes back there";
}

TEST_F(OverflowTest, SpilledMemoryIsFreedInAnyOrderAndState) {
  core().host_pool.set_capacity(kGiB);
  for (const bool is_paused : {false, true}) {
    for (size_t i = 0; i < 4; ++i) spill("w", i % 2 == 0 ? kSplitRam : kSplitNone, i * kChunk, (1 + i) * kChunk);
    if (is_paused) pause();
    for (const size_t index : {2, 0, 3, 1}) deallocate(core(), items_[index].address);
    items_.clear();
    expect_nothing_left();
  }
}

TEST_F(OverflowTest, BackupsOfSpilledTensorsSayWhyTheyCanNotBeShown) {
  const size_t item = spill("w", kSplitRam, 2 * kChunk, kChunk);
  pause();
  const CUdeviceptr address = items_[item].address;
  EXPECT_TRUE(view_backup(core(), {address, 2 * kChunk}).has_value());
  EXPECT_FALSE(view_backup(core(), {address + 2 * kChunk, kChunk}).has_value()) << "it is resident";
  EXPECT_THROW(view_backup(core(), {address, 3 * kChunk}), StateError);
}

TEST_F(OverflowTest, TwoDevicesSpillEachForItself) {
  spill("w", kSplitRam, kChunk, kChunk, 0);
  spill("w", kSplitRam, kChunk, 2 * kChunk, 1);
  expect_resident("made");
  pause();
  expect_sound("paused");
  resume();
  EXPECT_EQ(promote().rows.size(), 2u);
  expect_resident("promoted");
}

}  // namespace
}  // namespace ebbtide::testing
