// Resumes in the background: arrivals, waiting streams, frees meanwhile, and every way to fail.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "core/operation/pending.h"
#include "core_fixture.h"
#include "driver/context.h"
#include "driver/device_kernels.h"
#include "driver/stream.h"
#include "store/delivery_board.h"

namespace ebbtide::testing {
namespace {

class BackgroundResume : public CoreTest {
 protected:
  // Long enough for a thread on a busy machine to act in the middle of a resume.
  static constexpr uint64_t kPieceDelay = 300'000;  // microseconds
  static unsigned char* bytes_at(CUdeviceptr address) { return reinterpret_cast<unsigned char*>(address); }
};

TEST_F(BackgroundResume, AnAsynchronousResumeTellsOfArrivalsAndEndsWithItsReport) {
  for (const BackupKind kind : {BackupKind::kRam, BackupKind::kPinned, BackupKind::kDisk}) {
    const CUdeviceptr address = alloc_chunks("w", kind, 0, {kChunk, kChunk, kChunk});
    const auto is_whole = [&] {
      return holds(address, kChunk, 0) && holds(address + kChunk, kChunk, 1) && is_zero(address + 2 * kChunk, kChunk);
    };
    for (uint64_t chunk = 0; chunk < 2; ++chunk) fill(address + chunk * kChunk, kChunk, chunk);
    pause();
    const auto pending = PendingResume::start(claim(OperationKind::kResume));
    {
      const ContextScope scope(0);
      const Stream stream = Stream::create();
      pending->stream_wait(0, stream.get(), {{address + kChunk, 8}});
      stream.synchronize();
      EXPECT_TRUE(holds(address + kChunk, kChunk, 1));
      EXPECT_TRUE(pending->is_ready({address + kChunk, kChunk}));
      pending->stream_wait(0, stream.get(), {});
      stream.synchronize();
    }
    EXPECT_EQ(pending->wait().totals().bytes, 3 * kChunk);
    EXPECT_EQ(pending->wait().totals().copied, 2 * kChunk);
    EXPECT_TRUE(pending->is_over());
    EXPECT_TRUE(is_whole());
    pause();
    sim().fail("cuStreamQuery", 1, 999, 1);
    const auto failing = PendingResume::start(claim(OperationKind::kResume));
    EXPECT_THROW(failing->wait(), DriverError);
    EXPECT_THROW(failing->wait(), DriverError);
    sim().clear_failures();
    resume();
    EXPECT_TRUE(is_whole());
    deallocate(core(), address);
  }
}

TEST_F(BackgroundResume, OneWithoutAHolderGoesOn) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk});
  fill(address, 2 * kChunk, 1);
  pause();
  sim().set_delay("ebbtide_deliver", kPieceDelay);
  PendingResume::start(claim(OperationKind::kResume));
  EXPECT_TRUE(core().registry.is_away(address, 2 * kChunk)) << "no caller waited for it";
  sim().set_delay("ebbtide_deliver", 0);
  core().registry.wait_for({.names = {"w"}, .addresses = {}, .only = nullptr});
  EXPECT_TRUE(holds(address, 2 * kChunk, 1));
  BackgroundWork::wait_for_all();
  EXPECT_EQ(core().events.after(0).back().kind, "resume");
}

TEST_F(BackgroundResume, ArrivingMemoryIsAwayAndNotMissing) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk});
  const CUdeviceptr other = alloc("other", kChunk);
  const auto is_missing = [&](CUdeviceptr each) { return core().registry.is_missing(each, 2 * kChunk); };
  fill(address, 2 * kChunk, 1);
  EXPECT_FALSE(is_missing(address));
  pause();
  EXPECT_TRUE(is_missing(address));
  sim().set_delay("ebbtide_deliver", kPieceDelay);
  sim().fail("cuStreamQuery", 1, 999, 1);
  const auto failing = PendingResume::start(claim(OperationKind::kResume, {"w"}));
  EXPECT_TRUE(core().registry.is_away(address, 2 * kChunk));
  EXPECT_FALSE(is_missing(address));
  EXPECT_TRUE(is_missing(other)) << "not a part of the resume";
  sim().set_delay("ebbtide_deliver", 0);
  EXPECT_THROW(failing->wait(), DriverError);
  EXPECT_TRUE(is_missing(address)) << "it does not come";
  sim().clear_failures();
  resume();
  EXPECT_FALSE(is_missing(address));
}

TEST_F(BackgroundResume, BlocksOfOneValueComeBackInTheBackgroundToo) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {2 * kChunk, kChunk});
  std::memset(bytes_at(address), 7, kChunk);
  fill(address + kChunk, kChunk, 1);
  std::memset(bytes_at(address + 2 * kChunk), 9, kChunk);
  EXPECT_EQ(pause().totals().constant, 2 * kChunk);
  const auto pending = PendingResume::start(claim(OperationKind::kResume));
  EXPECT_EQ(pending->wait().totals().constant, 2 * kChunk);
  EXPECT_EQ(pending->wait().totals().copied, kChunk);
  EXPECT_TRUE(std::all_of(bytes_at(address), bytes_at(address + kChunk), [](unsigned char byte) { return byte == 7; }));
  EXPECT_TRUE(holds(address + kChunk, kChunk, 1));
  EXPECT_EQ(bytes_at(address)[3 * kChunk - 1], 9);
}

TEST_F(BackgroundResume, WithoutKernelsAResumeInTheBackgroundIsOverAtOnce) {
  const CUdeviceptr address = alloc("w", 2 * kChunk);
  fill(address, 2 * kChunk, 1);
  DeviceKernels::forget_all();
  sim().fail("cuModuleLoadData", 1, CUDA_ERROR_NOT_SUPPORTED, 0);
  pause();
  const auto pending = PendingResume::start(claim(OperationKind::kResume));
  EXPECT_TRUE(pending->is_over());
  EXPECT_TRUE(pending->is_ready({address, kChunk}));
  EXPECT_EQ(pending->wait().totals().copied, 2 * kChunk);
  EXPECT_TRUE(holds(address, 2 * kChunk, 1));
  sim().clear_failures();
  DeviceKernels::forget_all();
}

TEST_F(BackgroundResume, Invariant12_AFreeDoesNotWaitForAResumeInTheBackground) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk, kChunk});
  const CUdeviceptr doomed = alloc("w", kChunk);
  fill(address, 3 * kChunk, 1);
  fill(doomed, kChunk, 2);
  pause();
  const CUdeviceptr other = alloc("other", kChunk);
  const ContextScope scope(0);
  const Stream stream = Stream::create();
  sim().set_delay("ebbtide_deliver", kPieceDelay);
  const auto pending = PendingResume::start(claim(OperationKind::kResume));
  pending->stream_wait(0, stream.get(), {});
  const uint64_t synchronisations = sim().calls("cuCtxSynchronize");
  deallocate(core(), other);
  deallocate(core(), doomed);
  const CUdeviceptr fresh = alloc("other", kChunk);
  deallocate(core(), fresh);
  EXPECT_EQ(sim().calls("cuCtxSynchronize"), synchronisations);
  EXPECT_EQ(core().deferred_frees.count(), 2u);
  sim().set_delay("ebbtide_deliver", 0);
  pending->wait();
  BackgroundWork::wait_for_all();
  EXPECT_EQ(core().deferred_frees.count(), 0u);
  EXPECT_EQ(Live::now().device_bytes, 4 * kChunk) << "what came back behind one handle goes as a whole";
  EXPECT_TRUE(holds(address, 3 * kChunk, 1));
  pause();
  resume();
  EXPECT_EQ(Live::now().device_bytes, 3 * kChunk);
  EXPECT_TRUE(holds(address, 3 * kChunk, 1));
}

TEST_F(BackgroundResume, MemoryThatWasFreedMeanwhileIsAwaitedBeforeARefusal) {
  core().budgets.device.set_limit(8 * kChunk);
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk, kChunk});
  fill(address, 3 * kChunk, 1);
  pause();
  const CUdeviceptr other = alloc("other", 5 * kChunk);
  sim().set_delay("ebbtide_deliver", kPieceDelay);
  const auto pending = PendingResume::start(claim(OperationKind::kResume));
  deallocate(core(), other);
  EXPECT_EQ(core().deferred_frees.count(), 1u);
  sim().set_delay("ebbtide_deliver", 0);
  const CUdeviceptr fresh = alloc("other", 4 * kChunk);
  pending->wait();
  EXPECT_TRUE(holds(address, 3 * kChunk, 1));
  deallocate(core(), fresh);
}

TEST_F(BackgroundResume, Invariant9_ACaptureThatNobodyToldOfGoesOn) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk});
  fill(address, 2 * kChunk, 1);
  pause();
  const auto pending = PendingResume::start(claim(OperationKind::kResume));
  const ContextScope scope(0);
  const Stream stream = Stream::create();
  check(driver().cuStreamBeginCapture(stream.get(), CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
  EXPECT_EQ(pending->wait().totals().copied, 2 * kChunk);
  CUgraph graph = nullptr;
  EXPECT_EQ(driver().cuStreamEndCapture(stream.get(), &graph), CUDA_SUCCESS);
  EXPECT_EQ(driver().cuGraphDestroy(graph), CUDA_SUCCESS);
  EXPECT_TRUE(holds(address, 2 * kChunk, 1));
}

TEST_F(BackgroundResume, WhatAForegroundResumeDoesWithoutIsNoReasonToFail) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, 2 * kChunk});
  for (const bool is_limited : {true, false}) {
    fill(address, 3 * kChunk, 1);
    pause();
    core().engines.trim();
    resume();
    // A ring without the table for the digests of blocks.
    const uint64_t ring_bytes = core().engines.held_bytes();
    pause();
    core().engines.trim();
    // Limited: room for the ring but not for the table. Otherwise: no memory for the words of the board.
    core().budgets.pinned.set_limit(is_limited ? ring_bytes : kUnlimited);
    DeliveryBoard::forget_all();
    if (!is_limited) sim().fail("cuMemHostAlloc", 2, CUDA_ERROR_OUT_OF_MEMORY, 0);
    const auto pending = PendingResume::start(claim(OperationKind::kResume));
    EXPECT_TRUE(pending->is_over());
    EXPECT_EQ(pending->wait().totals().bytes, 3 * kChunk);
    sim().clear_failures();
    core().budgets.pinned.set_limit(kUnlimited);
    EXPECT_TRUE(holds(address, 3 * kChunk, 1));
  }
}

TEST_F(BackgroundResume, OneValueBlocksComeBackInTheForegroundAfterATryInTheBackground) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, 2 * kChunk});
  fill(address, kChunk, 1);
  std::memset(bytes_at(address + kChunk), 7, 2 * kChunk);
  pause();
  core().engines.trim();
  DeliveryBoard::forget_all();
  // The table is allocated, and the words of the board are not.
  sim().fail("cuMemHostAlloc", 2, CUDA_ERROR_OUT_OF_MEMORY, 0);
  const auto pending = PendingResume::start(claim(OperationKind::kResume));
  sim().clear_failures();
  EXPECT_TRUE(pending->is_over());
  EXPECT_EQ(pending->wait().totals().constant, 2 * kChunk);
  EXPECT_TRUE(holds(address, kChunk, 1));
  EXPECT_TRUE(std::all_of(bytes_at(address + kChunk), bytes_at(address + 3 * kChunk),
                          [](unsigned char byte) { return byte == 7; }));
}

TEST_F(BackgroundResume, OnlyAResumeIsLaunchedAndItsCommitWaitsForIt) {
  const CUdeviceptr address = alloc("w", kChunk);
  fill(address, kChunk, 1);
  pause();
  const auto launched = claim(OperationKind::kResume);
  ASSERT_NE(launched->launch(), nullptr);
  EXPECT_EQ(launched->commit().front().totals().bytes, kChunk);
  EXPECT_TRUE(holds(address, kChunk, 1));
  EXPECT_THROW(claim(OperationKind::kPause)->launch(), InvalidArgument);
}

TEST_F(BackgroundResume, Invariant3_ASecondDeviceWhoseLaunchFailsLeavesNothingOnTheFirst) {
  const CUdeviceptr first = alloc("w", 2 * kChunk, BackupKind::kRam, 0);
  const CUdeviceptr second = alloc("w", 2 * kChunk, BackupKind::kRam, 1);
  fill(first, 2 * kChunk, 1);
  fill(second, 2 * kChunk, 2);
  pause();
  PendingResume::start(claim(OperationKind::kResume))->wait();
  pause();
  sim().fail("cuLaunchKernel", 2, CUDA_ERROR_LAUNCH_FAILED, 1);
  EXPECT_THROW(PendingResume::start(claim(OperationKind::kResume)), DriverError);
  EXPECT_EQ(Live::now().device_bytes, 0u);
  EXPECT_FALSE(is_partial("w"));
  resume();
  EXPECT_TRUE(holds(first, 2 * kChunk, 1));
  EXPECT_TRUE(holds(second, 2 * kChunk, 2));
}

TEST_F(BackgroundResume, ADeviceThatDiesInTheMiddleEndsAResumeInTheBackground) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {4 * kChunk, 4 * kChunk, 40 * kChunk});
  for (uint64_t chunk = 0; chunk < 48; ++chunk) fill(address + chunk * kChunk, kChunk, chunk);
  pause();
  sim().fail("ebbtide_deliver", 3, CUDA_ERROR_ILLEGAL_ADDRESS, 1);
  const auto pending = PendingResume::start(claim(OperationKind::kResume));
  try {
    pending->wait();
    FAIL() << "no error";
  } catch (const DriverError& error) {
    EXPECT_EQ(error.code, CUDA_ERROR_ILLEGAL_ADDRESS);
  }
  EXPECT_TRUE(pending->is_ready({address, 48 * kChunk})) << "no stream may wait for bytes that do not come";
}

TEST_F(BackgroundResume, WhereTheDeviceHasNoSuchWaitsTheCallingThreadWaits) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk});
  fill(address, 2 * kChunk, 3);
  pause();
  const ContextScope scope(0);
  const Stream stream = Stream::create();
  sim().set_delay("ebbtide_deliver", 20000);
  sim().fail("cuStreamWaitValue32", 1, CUDA_ERROR_NOT_SUPPORTED, 100);
  const auto pending = PendingResume::start(claim(OperationKind::kResume));
  pending->stream_wait(0, stream.get(), {{address, 8}});
  EXPECT_TRUE(holds(address, kChunk, 3));
  pending->stream_wait(0, stream.get(), {});
  EXPECT_TRUE(pending->is_over());
  sim().clear_failures();
  sim().fail("cuStreamWaitValue32", 1, CUDA_ERROR_UNKNOWN, 1);
  pending->wait();
  pause();
  sim().set_delay("ebbtide_deliver", kPieceDelay);
  const auto other = PendingResume::start(claim(OperationKind::kResume));
  EXPECT_THROW(other->stream_wait(0, stream.get(), {}), DriverError);
  sim().set_delay("ebbtide_deliver", 0);
  other->wait();
}

// An access to unmapped memory would be a fault.
TEST_F(BackgroundResume, WhatWasQueuedBehindBytesThatDoNotComeFindsMappedMemory) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk});
  fill(address, 2 * kChunk, 3);
  pause();
  const ContextScope scope(0);
  const Stream stream = Stream::create();
  // Nothing runs until the driver is polled. The poll takes long enough for the stream to be waiting, and then fails.
  sim().set_delay("cuStreamQuery", kPieceDelay);
  sim().fail("cuStreamQuery", 1, 999, 1);
  const auto failing = PendingResume::start(claim(OperationKind::kResume));
  failing->stream_wait(0, stream.get(), {});
  check(driver().cuMemsetD8Async(address, 5, 2 * kChunk, stream.get()), "cuMemsetD8Async");
  EXPECT_THROW(failing->wait(), DriverError);
  sim().set_delay("cuStreamQuery", 0);
  stream.synchronize();
  resume();
}

}  // namespace
}  // namespace ebbtide::testing
