// The state of a tag that an operation left partial, and of its budgets, if other operations run before the one that
// finishes it.
#include "base/error.h"
#include "core/operation/pending.h"
#include "core/state/shortage.h"
#include "moves_world.h"
#include "store/delivery_board.h"

namespace ebbtide::testing {
namespace {

class PartialState : public MovesWorld {
 protected:
  void pause_midway(std::optional<BackupKind> backup = {}) {
    sim().fail("cuMemUnmap", 2, 999, 1);
    EXPECT_THROW(pause({}, backup), DriverError);
    sim().clear_failures();
    EXPECT_TRUE(is_partial("w"));
  }
  const std::vector<ItemSpec> items_of_ram_ = {{"w", {BackupKind::kRam}, 0, {1, 1, 1}},
                                               {"w", {BackupKind::kRam}, 0, {1}}};
};

TEST_F(PartialState, Invariant3_APrepareFinishesNothing) {
  build(items_of_ram_);
  pause_midway();
  claim(OperationKind::kPrepare)->commit();
  EXPECT_TRUE(is_partial("w"));
  pause();
  EXPECT_FALSE(is_partial("w"));
  expect_sound("paused");
  resume();
  expect_bytes("back");
}

TEST_F(PartialState, Invariant3_WhatReturnsOfOneAllocationFinishesNoTag) {
  build({{"w", {BackupKind::kRam}, 0, {1}}, {"w", {BackupKind::kRam}, 0, {1, 1}}, {"w", {BackupKind::kRam}, 0, {1}}});
  sim().fail("cuMemUnmap", 3, 999, 1);
  EXPECT_THROW(pause(), DriverError);
  sim().clear_failures();
  run_at(OperationKind::kResume, {"w"}, {items_[0].address});
  EXPECT_TRUE(is_partial("w"));
  resume();
  EXPECT_FALSE(is_partial("w"));
  expect_bytes("back");
}

TEST_F(PartialState, Invariant3_AFailureOnAPartOfTheTagFinishesNothing) {
  build({{"w", {BackupKind::kRam}, 0, {1}}, {"w", {BackupKind::kRam}, 0, {1, 1}}});
  pause_midway();
  sim().fail("cuMemMap", 4, 999, 1);
  EXPECT_THROW(claim(OperationKind::kDemote)->commit(), DriverError);
  sim().clear_failures();
  EXPECT_TRUE(is_partial("w"));
  resume();
  EXPECT_FALSE(is_partial("w"));
  claim(OperationKind::kPromote)->commit();
  expect_bytes("back");
}

TEST_F(PartialState, TheBackupOfAChunkIsFreedOnceTheChunkIsBack) {
  build({{"w", {BackupKind::kRam}, 0, {1, 1}}});
  core().rules.shared_handle_bytes.store(kChunk);
  pause();
  const uint64_t held_bytes = core().budgets.host.held_bytes();
  sim().fail("cuMemMap", 2, 999, 1);
  EXPECT_THROW(resume(), DriverError);
  sim().clear_failures();
  EXPECT_EQ(places(), (std::vector<Place>{Place::kDevice, Place::kStored}));
  EXPECT_EQ(core().budgets.host.held_bytes(), held_bytes - kChunk);
  resume();
  expect_bytes("back");
}

TEST_F(PartialState, Invariant3_AFreeOfTheRestFinishesATag) {
  for (const size_t rest : {size_t{0}, size_t{1}}) {
    build({{"w", {BackupKind::kRam}, 0, {1}}, {"w", {BackupKind::kRam}, 0, {1, 1}}});
    pause_midway();
    deallocate(core(), items_[rest].address);
    items_.erase(items_.begin() + static_cast<ptrdiff_t>(rest));
    EXPECT_FALSE(is_partial("w")) << "all that is left is on one side";
    resume();
    expect_bytes("back");
  }
}

TEST_F(PartialState, Invariant3_ATrimThatIsAbandonedHidesNothingFromAResume) {
  build(items_of_ram_);
  pause_midway();
  {
    OperationRequest request;
    request.tags.addresses = {items_[0].address};
    const auto trim = Operation::claim(core(), OperationKind::kTrim, request);
  }
  resume();
  expect_bytes("back");
}

TEST_F(PartialState, Invariant7_PinnedMemoryThatCouldNotBeGivenBackIsCounted) {
  build({{"p", {BackupKind::kPinned, false}, 0, {4}}});
  pause();
  const uint64_t held_bytes = core().budgets.host.held_bytes();
  sim().fail("cuMemHostUnregister", 1, 999, 100);
  resume();
  core().engines.trim();
  EXPECT_GE(core().budgets.host.held_bytes(), held_bytes);
  sim().clear_failures();
  give_back_caches(core());
  EXPECT_LT(core().budgets.host.held_bytes(), held_bytes);
}

TEST_F(PartialState, Invariant7_APinnedBackupIsCountedWholeWhereSomeOfItWasDropped) {
  build({{"w", {BackupKind::kPinned}, 0, {1, 1, 1}}});
  pause_midway(BackupKind::kNone);
  pause();
  expect_sound("paused");
  resume();
  expect_bytes("back");
  free_all();
  expect_nothing_left();
}

// A failure before a resume in the background has moved a byte is reported as other failures are, and changes nothing.
TEST_F(PartialState, Invariant3_AResumeThatFailsBeforeItsBytesMoveIsInTheLog) {
  for (const bool is_midway : {false, true}) {
    build(items_of_ram_);
    if (is_midway) pause_midway();
    if (!is_midway) pause();
    for (const char* call : {"cuMemCreate", "cuMemHostAlloc", "cuMemMap", "cuMemSetAccess", "cuLaunchKernel"}) {
      SCOPED_TRACE(call);
      const std::vector<Place> before = places();
      const uint64_t failures = core().counters.operation_failures;
      const uint64_t sequence = core().events.after(0).back().sequence;
      DeliveryBoard::forget_all();
      // Access is requested twice: with the peers, and for the device alone.
      sim().fail(call, 1, 999, call == std::string("cuMemSetAccess") ? 2 : 1);
      EXPECT_THROW(PendingResume::start(claim(OperationKind::kResume)), DriverError);
      sim().clear_failures();
      EXPECT_EQ(places(), before);
      EXPECT_EQ(is_partial("w"), is_midway);
      EXPECT_EQ(core().counters.operation_failures, failures + 1);
      const auto events = core().events.after(sequence);
      ASSERT_EQ(events.size(), 1u);
      EXPECT_EQ(events.front().kind, "resume_failed");
      EXPECT_EQ(events.front().tags, "w");
      EXPECT_EQ(events.front().bytes, 0u);
      EXPECT_NE(events.front().detail.find(name_in_use(call)), std::string::npos) << events.front().detail;
      expect_sound("refused");
    }
    PendingResume::start(claim(OperationKind::kResume))->wait();
    EXPECT_FALSE(is_partial("w"));
    expect_bytes("back");
  }
}

class AbandonedClaim : public MovesWorld {
 protected:
  OperationRequest all_unused() {
    OperationRequest request;
    request.unused = AddressRanges({{items_[0].address, items_[0].content.size() * kChunk}});
    request.unused_as_of = core().registry.leases.newest();
    return request;
  }
};

// The caller calls the memory unused for this resume alone.
TEST_F(AbandonedClaim, Invariant3_AResumeThatDoesNotHappenForgetsNoBytes) {
  for (const bool is_short : {false, true}) {
    SCOPED_TRACE(is_short ? "out of memory" : "abandoned");
    build({{"w", {BackupKind::kRam}, 0, {1, 2}}});
    core().rules.keeps_ahead.store(true);
    pause();
    auto stored = core().registry.find(items_[0].address)->stored;
    if (is_short) {
      core().budgets.device.set_limit(kChunk);
      EXPECT_THROW(Operation::claim(core(), OperationKind::kResume, all_unused()), OutOfMemory);
      core().budgets.device.set_limit(kUnlimited);
    } else {
      Operation::claim(core(), OperationKind::kResume, all_unused())->abandon();
    }
    EXPECT_FALSE(stored->is_spare) << "the resume would have kept it";
    EXPECT_EQ(resume().totals().copied, 3 * kChunk);
    expect_bytes("back");
    EXPECT_TRUE(stored->is_spare);
    stored.reset();
    free_all();
    expect_nothing_left();
  }
}

TEST_F(AbandonedClaim, Invariant3_AResumeThatFailsMidwayForgetsNoBytesOfTheRest) {
  if (is_hip()) GTEST_SKIP() << "what is cleared arrives at the end, so nothing has where it fails";
  build({{"w", {BackupKind::kRam}, 0, {1, 1}}});
  core().rules.shared_handle_bytes.store(kChunk);
  pause();
  OperationRequest request = all_unused();
  sim().fail("cuMemMap", 2, 999, 1);
  EXPECT_THROW(Operation::claim(core(), OperationKind::kResume, std::move(request))->commit(), DriverError);
  sim().clear_failures();
  EXPECT_EQ(places(), (std::vector<Place>{Place::kDevice, Place::kStored}));
  EXPECT_EQ(resume().totals().copied, kChunk);
  items_[0].content[0] = 0;
  expect_bytes("the first forgotten, the second back");
}

TEST_F(AbandonedClaim, Invariant3_APauseThatDoesNotHappenSaysNothingOfWhoUsesIt) {
  build({{"w", {BackupKind::kRam}, 0, {1}}});
  Operation::claim(core(), OperationKind::kPause, all_unused())->abandon();
  EXPECT_FALSE(core().registry.find(items_[0].address)->is_unused);
  Operation::claim(core(), OperationKind::kPause, all_unused())->commit();
  EXPECT_TRUE(core().registry.find(items_[0].address)->is_unused);
}

}  // namespace
}  // namespace ebbtide::testing
