// What is known of a tag that an operation left midway, and of its budgets, when other operations come before the one that finishes it.
#include "base/error.h"
#include "moves_world.h"

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

TEST_F(PartialState, Invariant3_ATrimThatIsAbandonedHidesNothingFromAResume) {
  build(items_of_ram_);
  pause_midway();
  {
    OperationRequest request;
    request.tags.addresses = {items_[0].address};
    const auto trim = saver().claim(OperationKind::kTrim, request);
  }
  resume();
  expect_bytes("back");
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

}  // namespace
}  // namespace ebbtide::testing
