// What becomes of backups that outlive their use: the device may still write into them, or somebody looks at them.
#include <gtest/gtest.h>

#include "base/error.h"
#include "core/backup_view.h"
#include "core_fixture.h"
#include "driver/context.h"

namespace ebbtide::testing {
namespace {

constexpr int kOther = 999;

class BackupLifetime : public CoreTest {
 protected:
  uint64_t host_bytes_of_backups() { return saver().host_budget.held_bytes() - saver().engines.held_bytes(); }
  uint64_t pinned_bytes_of_backups() { return saver().pinned_budget.held_bytes() - saver().engines.held_bytes(); }
};

TEST_F(BackupLifetime, APinnedBackupThatTheDeviceMayStillWriteIntoStaysInTheBooks) {
  saver().skip.clean = saver().skip.constant = false;
  const CUdeviceptr address = alloc("w", kChunk, BackupKind::kPinned);
  sim().fail("cuEventSynchronize", 1, kOther, 0);
  sim().fail("cuStreamSynchronize", 1, kOther, 0);
  EXPECT_THROW(pause(), DriverError);
  sim().clear_failures();
  EXPECT_EQ(resident_bytes("w"), kChunk);
  saver().free(address);
  saver().engines.trim();
  EXPECT_EQ(Live::now().registered_ranges, 2u) << "the ring and the backup";
  EXPECT_EQ(host_bytes_of_backups(), kChunk);
  EXPECT_EQ(pinned_bytes_of_backups(), kChunk);
  EXPECT_EQ(saver().pinned_budget.lost_bytes(), kChunk);
  saver().free(alloc("w", kChunk, BackupKind::kPinned));
  EXPECT_EQ(host_bytes_of_backups(), kChunk);
}

// What an operation leaves midway goes on with the backup that it has.
class ViewsOfWhatIsMidway : public BackupLifetime {
 protected:
  void resume_midway() {
    sim().fail("cuMemcpyHtoDAsync", 2, kOther, 1);
    EXPECT_THROW(resume(), DriverError);
    sim().clear_failures();
    EXPECT_TRUE(is_partial("w"));
  }
};

TEST_F(ViewsOfWhatIsMidway, NobodyWritesUnderThem) {
  saver().shared_handle_bytes = 0;
  for (const BackupKind kind : {BackupKind::kRam, BackupKind::kPinned}) {
    const CUdeviceptr address = alloc_chunks("w", kind, 0, {kChunk, kChunk, kChunk});
    fill(address, 3 * kChunk, 1);
    pause();
    std::optional<BackupView> view;
    view.emplace(*view_backup(saver(), {address, 3 * kChunk}, false));
    const auto seen = reinterpret_cast<CUdeviceptr>(view->bytes());
    resume_midway();
    EXPECT_EQ(place_of(address), Place::kDevice);
    fill(address, kChunk, 2);
    for (const OperationKind refused : {OperationKind::kPause, OperationKind::kSwap}) {
      OperationRequest request;
      request.tags.names = {"w"};
      if (refused == OperationKind::kSwap) request.resume_tags = {{"other"}, {}, true};
      try {
        saver().claim(refused, std::move(request))->commit();
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
    saver().free(address);
  }
}

// The memory is back in the region, and only the view still has the backup.
class ViewsAndCaptures : public BackupLifetime {
 protected:
  ViewsAndCaptures() {
    address_ = alloc("w", kChunk, BackupKind::kPinned);
    fill(address_, kChunk, 1);
    pause();
    view_.emplace(*view_backup(saver(), {address_, kChunk}, false));
    other_view_.emplace(*view_backup(saver(), {address_, 8}, false));
    resume();
    saver().engines.trim();
    EXPECT_EQ(Live::now().registered_ranges, 1u);
  }
  void expect_put_off() {
    EXPECT_EQ(saver().deferred_frees.count(), 1u) << "two views, one backup";
    EXPECT_EQ(Live::now().registered_ranges, 1u);
    EXPECT_EQ(host_bytes_of_backups(), kChunk) << "put off, and still counted";
    EXPECT_EQ(pinned_bytes_of_backups(), kChunk);
  }
  void expect_gone() {
    EXPECT_TRUE(saver().give_back_caches());
    EXPECT_EQ(saver().deferred_frees.count(), 0u);
    EXPECT_EQ(Live::now().registered_ranges, 0u);
    EXPECT_EQ(host_bytes_of_backups() + pinned_bytes_of_backups(), 0u);
  }

  CUdeviceptr address_ = 0;
  std::optional<BackupView> view_;
  std::optional<BackupView> other_view_;
};

TEST_F(ViewsAndCaptures, Invariant9_TheLastViewThatDiesUnpinsNothingBesideACapture) {
  saver().capture_gate.begin_capture();
  view_.reset();
  other_view_.reset();
  expect_put_off();
  EXPECT_FALSE(saver().give_back_caches()) << "the capture still runs";
  expect_put_off();
  saver().capture_gate.end_capture();
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
  EXPECT_EQ(saver().deferred_frees.count(), 0u);
}

}  // namespace
}  // namespace ebbtide::testing
