// Memory that several allocations share, when one of them is freed, trimmed, or paused alone.
#include <gtest/gtest.h>

#include "base/error.h"
#include "shared_fixture.h"
#include "vmm/deferred_undos.h"

namespace ebbtide::testing {
namespace {

class SharedFreesTest : public SharedTest {
 protected:
  // Three allocations that share a handle.
  void start() {
    parts_ = make("w", 3);
    come_back();
    ASSERT_EQ(handles(), 1u);
  }
  bool is_trimmed(CUdeviceptr address) { return core().registry.find(address)->is_trimmed; }

  std::vector<CUdeviceptr> parts_;
};

TEST_F(SharedFreesTest, TheMemoryOfOneThatIsFreedStaysUntilTheLastGoes) {
  for (const std::vector<size_t>& order : std::vector<std::vector<size_t>>{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}}) {
    start();
    deallocate(core(), parts_[order[0]]);
    expect_device_bytes(3 * kChunk);
    EXPECT_TRUE(is_whole(parts_[order[1]]));
    EXPECT_TRUE(is_whole(parts_[order[2]]));
    EXPECT_THROW(deallocate(core(), parts_[order[0]]), InvalidArgument);
    deallocate(core(), parts_[order[1]]);
    expect_device_bytes(3 * kChunk);
    EXPECT_TRUE(is_whole(parts_[order[2]]));
    deallocate(core(), parts_[order[2]]);
    expect_device_bytes(0);
    EXPECT_EQ(Live::now().reservations, 0u);
  }
  expect_no_leak();
}

TEST_F(SharedFreesTest, Invariant1_MappedAddressesAreNotGivenOut) {
  start();
  deallocate(core(), parts_[1]);
  const auto fresh = make("w", 2);
  for (const CUdeviceptr address : fresh) EXPECT_GE(address, parts_[2] + kChunk);
  expect_device_bytes(5 * kChunk);
  expect_whole({parts_[0], parts_[2], fresh[0], fresh[1]});
  // The pause releases the memory, and with it the addresses.
  EXPECT_EQ(pause().totals().bytes, 5 * kChunk);
  const auto in_gap = make("w", 1);
  EXPECT_EQ(in_gap.front(), parts_[1]);
  resume();
  expect_device_bytes(5 * kChunk);
  expect_whole({parts_[0], parts_[2], fresh[0], fresh[1], in_gap[0]});
}

TEST_F(SharedFreesTest, APauseGivesBackWhatWasFreedAndCountsIt) {
  start();
  deallocate(core(), parts_[0]);
  const Report report = pause();
  EXPECT_EQ(report.totals().bytes, 3 * kChunk);
  EXPECT_EQ(report.totals().copied, 2 * kChunk);
  expect_device_bytes(0);
  EXPECT_EQ(resume().totals().bytes, 2 * kChunk);
  expect_device_bytes(2 * kChunk);
  expect_whole({parts_[1], parts_[2]});
}

TEST_F(SharedFreesTest, WhatWasFreedIsNoRoomForOthersUntilThoseThatShareHaveBeenAway) {
  start();
  core().budgets.device.set_limit(3 * kChunk);
  deallocate(core(), parts_[2]);
  EXPECT_THROW(alloc("w", kChunk), OutOfMemory);
  EXPECT_THROW(alloc("other", kChunk), OutOfMemory);
  come_back();
  EXPECT_EQ(make("w", 1).front(), parts_[2]);
  expect_whole({parts_[0], parts_[1]});
}

TEST_F(SharedFreesTest, WhatWasDroppedAndFreedCountsAsWell) {
  const auto parts = make("kv", 3, {BackupKind::kNone});
  come_back();
  deallocate(core(), parts[1]);
  EXPECT_EQ(pause().totals().bytes, 3 * kChunk);
  expect_device_bytes(0);
  EXPECT_EQ(resume().totals().bytes, 2 * kChunk);
  EXPECT_EQ(handles(), 2u) << "there is a gap now";
}

TEST_F(SharedFreesTest, OneThatIsFreedWhileAllAreAwayTakesNothingAlong) {
  start();
  pause();
  deallocate(core(), parts_[2]);
  expect_device_bytes(0);
  EXPECT_EQ(resume().totals().bytes, 2 * kChunk);
  EXPECT_EQ(handles(), 1u);
  expect_whole({parts_[0], parts_[1]});
}

TEST_F(SharedFreesTest, Invariant9_DuringACaptureTheFreeIsPutOffAndTheMemoryStaysWithTheOthers) {
  start();
  core().capture_gate.begin_capture();
  deallocate(core(), parts_[0]);
  EXPECT_EQ(core().deferred_frees.count(), 1u);
  expect_device_bytes(3 * kChunk);
  core().capture_gate.end_capture();
  give_back_caches(core());
  EXPECT_EQ(core().deferred_frees.count(), 0u);
  expect_device_bytes(3 * kChunk);
  expect_whole({parts_[1], parts_[2]});
  free_all({parts_[1], parts_[2]});
  expect_device_bytes(0);
}

TEST_F(SharedFreesTest, Invariant5_AFreeThatCouldNotWaitKeepsItsShareThroughAPause) {
  start();
  sim().fail("cuCtxSynchronize", 1, 999, 1);
  deallocate(core(), parts_[1]);
  EXPECT_EQ(core().deferred_frees.count(), 1u);
  // The first attempt of the pause's own claim fails as well.
  sim().fail("cuCtxSynchronize", 1, 999, 1);
  EXPECT_EQ(pause().totals().bytes, 3 * kChunk);
  sim().clear_failures();
  give_back_caches(core());
  EXPECT_EQ(core().deferred_frees.count(), 0u);
  EXPECT_EQ(resume().totals().bytes, 2 * kChunk);
  expect_whole({parts_[0], parts_[2]});
  expect_no_leak();
}

TEST_F(SharedFreesTest, Invariant3_ASharedMappingThatCouldNotBeUndoneKeepsTheAddressesOfAll) {
  start();
  deallocate(core(), parts_[0]);
  deallocate(core(), parts_[1]);
  sim().fail("cuMemUnmap", 1, 999, 1);
  deallocate(core(), parts_[2]);
  EXPECT_EQ(deferred_undos::count(), 1u);
  EXPECT_EQ(deferred_undos::held_bytes(0), 3 * kChunk);
  EXPECT_EQ(Live::now().reservations, 1u);
  sim().fail("cuMemUnmap", 1, 999, 1);
  const auto fresh = make("w", 1);
  EXPECT_EQ(fresh.front(), parts_[2] + kChunk);
  give_back_caches(core());
  EXPECT_EQ(deferred_undos::count(), 0u);
  const auto next = make("w", 1);
  EXPECT_EQ(next.front(), parts_[0]);
  free_all({fresh.front(), next.front()});
  expect_no_leak();
}

TEST_F(SharedFreesTest, ATrimOfOneThatSharesTakesNothingWithoutRoom) {
  start();
  core().budgets.device.set_limit(core().budgets.device.held_bytes(0));  // no room to separate them
  const Live before = Live::now();
  const Report report = run_at(OperationKind::kTrim, {"w"}, {parts_[1]});
  EXPECT_EQ(report.totals().bytes, 0u);
  EXPECT_TRUE(report.rows.empty());
  EXPECT_EQ(Live::now(), before);
  EXPECT_FALSE(is_trimmed(parts_[1]));
  EXPECT_FALSE(is_partial("w"));
  expect_whole(parts_);
  EXPECT_EQ(pause().totals().copied, 3 * kChunk);
  resume();
  expect_whole(parts_);
}

TEST_F(SharedFreesTest, ATrimTakesThoseThatStandAloneAndLeavesTheOthers) {
  start();
  const auto alone = make("w", 1);
  core().budgets.device.set_limit(core().budgets.device.held_bytes(0));  // no room to separate them
  EXPECT_EQ(run_at(OperationKind::kTrim, {"w"}, {parts_[0], parts_[1], alone[0]}).totals().bytes, kChunk);
  expect_device_bytes(3 * kChunk);
  EXPECT_TRUE(is_trimmed(alone[0]));
  EXPECT_FALSE(is_trimmed(parts_[0]));
  expect_whole(parts_);
}

TEST_F(SharedFreesTest, ATrimOfAllThatShareTakesThemAndTheyComeBackWhenTheyAreNamed) {
  start();
  const auto content = make("w", 1);
  EXPECT_EQ(run_at(OperationKind::kTrim, {"w"}, parts_).totals().bytes, 3 * kChunk);
  expect_device_bytes(kChunk);
  EXPECT_EQ(resume().totals().bytes, 0u);
  EXPECT_EQ(run_at(OperationKind::kResume, {"w"}, {parts_[1]}).totals().bytes, kChunk);
  EXPECT_TRUE(is_zero(parts_[1], kChunk));
  EXPECT_EQ(run_at(OperationKind::kResume, {"w"}, {parts_[2], parts_[0]}).totals().bytes, 2 * kChunk);
  EXPECT_EQ(handles(), 4u) << "they came back one after the other";
  for (const CUdeviceptr address : parts_) {
    EXPECT_TRUE(is_zero(address, kChunk));
    write(address, kChunk);
  }
  come_back();
  EXPECT_EQ(handles(), 1u);
  expect_whole(parts_);
  expect_whole(content);
}

TEST_F(SharedFreesTest, ATrimOfTheLastThatSharesTakesTheMemoryOfThoseThatAreFreed) {
  start();
  free_all({parts_[0], parts_[2]});
  EXPECT_EQ(run_at(OperationKind::kTrim, {"w"}, {parts_[1]}).totals().bytes, 3 * kChunk);
  expect_device_bytes(0);
  EXPECT_EQ(run_at(OperationKind::kResume, {"w"}, {parts_[1]}).totals().bytes, kChunk);
  EXPECT_TRUE(is_zero(parts_[1], kChunk));
}

TEST_F(SharedFreesTest, Invariant3_APauseOfOneThatSharesSaysWhatToDoAndChangesNothing) {
  for (const Policy& policy :
       {Policy{BackupKind::kRam, true}, Policy{BackupKind::kPinned}, Policy{BackupKind::kNone}}) {
    const auto parts = make("w", 2, policy);
    const auto alone = make("w", 1, {BackupKind::kRam});
    come_back();
    for (const CUdeviceptr address : parts) write(address, kChunk);
    core().engines.trim();
    const Live before = Live::now();
    const uint64_t host_bytes = core().budgets.host.held_bytes();
    core().budgets.device.set_limit(core().budgets.device.held_bytes(0));  // no room to separate them
    try {
      run_at(OperationKind::kPause, {"w"}, {alone[0], parts[0]});
      ADD_FAILURE() << "nothing was thrown";
    } catch (const StateError& error) {
      EXPECT_NE(std::string(error.what()).find("pause the tag"), std::string::npos) << error.what();
    }
    core().budgets.device.set_limit(kUnlimited);
    EXPECT_EQ(Live::now(), before);
    EXPECT_EQ(core().budgets.host.held_bytes(), host_bytes);
    EXPECT_FALSE(is_partial("w"));
    expect_whole(parts);
    expect_whole(alone);
    EXPECT_EQ(run_at(OperationKind::kPause, {"w"}, {parts[1], parts[0]}).totals().bytes, 2 * kChunk);
    expect_device_bytes(kChunk);
    resume();
    if (policy.backup != BackupKind::kNone) expect_whole(parts);
    free_all(parts);
    free_all(alone);
  }
  expect_no_leak();
}

}  // namespace
}  // namespace ebbtide::testing
