// Backups that outlive their use: the device may still write into them, or a view of them exists.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>

#include "base/error.h"
#include "core/operation/backup_view.h"
#include "core_fixture.h"
#include "driver/context.h"

namespace ebbtide::testing {
namespace {

class BackupLifetime : public CoreTest {
 protected:
  uint64_t host_bytes_of_backups() { return core().budgets.host.held_bytes() - core().engines.held_bytes(); }
  uint64_t pinned_bytes_of_backups() { return core().budgets.pinned.held_bytes() - core().engines.held_bytes(); }
};

TEST_F(BackupLifetime, APinnedBackupThatTheDeviceMayStillWriteIntoStaysInTheBooks) {
  core().rules.skip.clean = core().rules.skip.constant = false;
  const CUdeviceptr address = alloc("w", kChunk, BackupKind::kPinned);
  sim().fail("cuEventSynchronize", 1, kOther, 0);
  sim().fail("cuStreamSynchronize", 1, kOther, 0);
  EXPECT_THROW(pause(), DriverError);
  sim().clear_failures();
  EXPECT_EQ(resident_bytes("w"), kChunk);
  deallocate(core(), address);
  core().engines.trim();
  EXPECT_EQ(Live::now().registered_ranges, 2u) << "the ring and the backup";
  EXPECT_EQ(host_bytes_of_backups(), kChunk);
  EXPECT_EQ(pinned_bytes_of_backups(), kChunk);
  EXPECT_EQ(core().budgets.pinned.lost_bytes(), kChunk);
  deallocate(core(), alloc("w", kChunk, BackupKind::kPinned));
  EXPECT_EQ(host_bytes_of_backups(), kChunk);
}

// Memory that an operation leaves partly away keeps its backup.
class ViewsOfWhatIsMidway : public BackupLifetime {
 protected:
  void resume_midway() {
    sim().fail("cuEventSynchronize", 2, kOther, 1);  // when the first chunk has landed
    EXPECT_THROW(resume(), DriverError);
    sim().clear_failures();
    EXPECT_TRUE(is_partial("w"));
  }
};

TEST_F(ViewsOfWhatIsMidway, NobodyWritesUnderThem) {
  core().rules.shared_handle_bytes = 0;
  for (const BackupKind kind : {BackupKind::kRam, BackupKind::kPinned}) {
    const CUdeviceptr address = alloc_chunks("w", kind, 0, {kChunk, kChunk, kChunk});
    fill(address, 3 * kChunk, 1);
    pause();
    std::optional<BackupView> view;
    view.emplace(*view_backup(core(), {address, 3 * kChunk}));
    const auto seen = reinterpret_cast<CUdeviceptr>(view->bytes());
    resume_midway();
    EXPECT_EQ(place_of(address), Place::kDevice);
    fill(address, kChunk, 2);
    for (const OperationKind refused : {OperationKind::kPause, OperationKind::kSwap}) {
      OperationRequest request;
      request.tags.names = {"w"};
      if (refused == OperationKind::kSwap) request.resume_tags = {{"other"}, {}, true};
      try {
        Operation::claim(core(), refused, std::move(request))->commit();
        ADD_FAILURE() << "nothing was thrown";
      } catch (const StateError& error) {
        EXPECT_NE(std::string(error.what()).find("let go of the view"), std::string::npos) << error.what();
      }
      EXPECT_TRUE(is_partial("w"));
    }
    EXPECT_TRUE(holds(seen, 3 * kChunk, 1));
    resume();
    EXPECT_TRUE(holds(address, kChunk, 2));
    EXPECT_TRUE(holds(seen, 3 * kChunk, 1)) << "and it stays as it is once all is back";
    pause();
    EXPECT_TRUE(holds(seen, 3 * kChunk, 1)) << "the next pause has a backup of its own";
    resume_midway();
    view.reset();
    pause();
    resume();
    EXPECT_TRUE(holds(address, kChunk, 2));
    deallocate(core(), address);
  }
}

// The holder of a view may write to the stored bytes undetected, so what was known about these bytes is not used again.
class ViewsThatAreWritten : public BackupLifetime, public ::testing::WithParamInterface<BackupKind> {
 protected:
  CUdeviceptr alloc_retained(size_t chunks) {
    return allocate(core(), core().registry.tag("w"), {.backup = GetParam(), .retain = true}, 0, chunks * kChunk);
  }
};

TEST_P(ViewsThatAreWritten, WhatWasThereBeforeIsNotTakenForUnchanged) {
  const CUdeviceptr address = alloc_retained(1);
  fill(address, kChunk, 1);
  pause();
  {
    const auto view = view_backup(core(), {address, 8});
    fill(reinterpret_cast<CUdeviceptr>(view->bytes()), kChunk, 2);
  }
  resume();
  EXPECT_TRUE(holds(address, kChunk, 2));
  fill(address, kChunk, 1);
  const ReportRow paused = pause().totals();
  EXPECT_EQ(paused.copied, kChunk);
  resume();
  EXPECT_TRUE(holds(address, kChunk, 1)) << "what the device had, not what the view wrote";
  EXPECT_EQ(pause().totals().clean, kChunk) << "and from now on its digest is known again";
}

TEST_P(ViewsThatAreWritten, OnlyTheBlocksThatWereLookedAtAreCopiedAgain) {
  const CUdeviceptr address = alloc_retained(4);
  fill(address, 4 * kChunk, 1);
  for (const AddressRange& shown :
       {AddressRange{address + 2 * kChunk - 1, 1}, AddressRange{address + 4 * kChunk - 1, 0},
        AddressRange{address + 4 * kChunk - 1, 1}, AddressRange{address, 8}}) {
    pause();
    EXPECT_TRUE(view_backup(core(), shown));
    resume();
    const ReportRow paused = pause().totals();
    EXPECT_EQ(paused.copied, kChunk);
    EXPECT_EQ(paused.clean, 3 * kChunk);
    resume();
  }
  pause();
  EXPECT_TRUE(view_backup(core(), {address + kChunk - 1, 2}));
  resume();
  EXPECT_EQ(pause().totals().copied, 2 * kChunk) << "a range over two of them";
}

TEST_P(ViewsThatAreWritten, BlocksOfOneValueComeBackAsTheyWereWritten) {
  const CUdeviceptr address = alloc_retained(2);
  fill(address, kChunk, 1);
  pause();
  resume();
  std::memset(reinterpret_cast<void*>(address), 0, kChunk);
  EXPECT_EQ(pause().totals().constant, 2 * kChunk);
  {
    const auto view = view_backup(core(), {address, 2 * kChunk});
    EXPECT_TRUE(is_zero(reinterpret_cast<CUdeviceptr>(view->bytes()), 2 * kChunk));
    fill(reinterpret_cast<CUdeviceptr>(view->bytes()) + kChunk, kChunk, 3);
  }
  const ReportRow resumed = resume().totals();
  EXPECT_EQ(resumed.copied, 2 * kChunk) << "who knows what the view wrote";
  EXPECT_TRUE(is_zero(address, kChunk));
  EXPECT_TRUE(holds(address + kChunk, kChunk, 3));
  fill(address, kChunk, 1);
  EXPECT_EQ(pause().totals().copied, 2 * kChunk);
  resume();
  EXPECT_TRUE(holds(address, kChunk, 1));
  EXPECT_TRUE(holds(address + kChunk, kChunk, 3));
}

std::string name_of(const ::testing::TestParamInfo<BackupKind>& info) {
  return std::array{"none", "ram", "pinned", "disk"}[static_cast<size_t>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(Kinds, ViewsThatAreWritten,
                         ::testing::Values(BackupKind::kRam, BackupKind::kPinned, BackupKind::kDisk), name_of);

// The memory is back in the region, and only the view still holds the backup.
class ViewsAndCaptures : public BackupLifetime {
 protected:
  ViewsAndCaptures() {
    address_ = alloc("w", kChunk, BackupKind::kPinned);
    fill(address_, kChunk, 1);
    pause();
    view_.emplace(*view_backup(core(), {address_, kChunk}));
    other_view_.emplace(*view_backup(core(), {address_, 8}));
    resume();
    core().engines.trim();
    EXPECT_EQ(Live::now().registered_ranges, 1u);
  }
  void expect_put_off() {
    EXPECT_EQ(core().deferred_frees.count(), 1u) << "two views, one backup";
    EXPECT_EQ(Live::now().registered_ranges, 1u);
    EXPECT_EQ(host_bytes_of_backups(), kChunk) << "put off, and still counted";
    EXPECT_EQ(pinned_bytes_of_backups(), kChunk);
  }
  void expect_gone() {
    EXPECT_TRUE(give_back_caches(core()));
    EXPECT_EQ(core().deferred_frees.count(), 0u);
    EXPECT_EQ(Live::now().registered_ranges, 0u);
    EXPECT_EQ(host_bytes_of_backups() + pinned_bytes_of_backups(), 0u);
  }

  CUdeviceptr address_ = 0;
  std::optional<BackupView> view_;
  std::optional<BackupView> other_view_;
};

TEST_F(ViewsAndCaptures, Invariant9_TheLastViewThatDiesUnpinsNothingBesideACapture) {
  core().capture_gate.begin_capture();
  view_.reset();
  other_view_.reset();
  expect_put_off();
  EXPECT_FALSE(give_back_caches(core())) << "the capture still runs";
  expect_put_off();
  core().capture_gate.end_capture();
  expect_gone();
}

// A capture that ebbtide was not told of, but that a blocking stream shows.
TEST_F(ViewsAndCaptures, Invariant9_NorBesideOneOfTheDriver) {
  const ContextScope scope(0);
  CUstream stream = nullptr;
  check(driver().cuStreamCreate(&stream, CU_STREAM_DEFAULT), "cuStreamCreate");
  check(driver().cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
  view_.reset();
  other_view_.reset();
  expect_put_off();
  CUgraph graph = nullptr;
  EXPECT_EQ(driver().cuStreamEndCapture(stream, &graph), CUDA_SUCCESS) << "the capture is whole";
  check(driver().cuGraphDestroy(graph), "cuGraphDestroy");
  check(driver().cuStreamDestroy(stream), "cuStreamDestroy");
  expect_gone();
}

TEST_F(ViewsAndCaptures, WithoutACaptureItGoesAtOnce) {
  view_.reset();
  EXPECT_EQ(Live::now().registered_ranges, 1u);
  other_view_.reset();
  EXPECT_EQ(Live::now().registered_ranges, 0u);
  EXPECT_EQ(core().deferred_frees.count(), 0u);
}

}  // namespace
}  // namespace ebbtide::testing
