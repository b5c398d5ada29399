// Stream captures beside operations, allocations and frees of other threads.
#include <gtest/gtest.h>

#include <atomic>

#include "driver/context.h"
#include "threads_fixture.h"

namespace ebbtide::testing {
namespace {

constexpr int kIllegalAddress = 700;

TEST_F(ThreadsTest, Invariant9_ACaptureWaitsForTheOperationAndKeepsOthersOut) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, kFive);
  const CUdeviceptr freed = alloc("other", kChunk);
  Slow slow("cuMemcpyDtoHAsync", kStand / 4, [&] { pause({"w"}); });
  core().capture_gate.begin_capture();
  EXPECT_EQ(resident_bytes("w"), 0u) << "begin waits until the operation is over";
  slow.join();
  EXPECT_THROW(resume(), StateError);
  EXPECT_THROW(pause(), StateError);
  sim().clear_log();
  const CUdeviceptr made = alloc("other", kChunk);
  deallocate(core(), freed);
  deallocate(core(), made);
  EXPECT_EQ(sim().calls("cuCtxSynchronize"), 0u) << "it would break the capture";
  EXPECT_EQ(core().deferred_frees.count(), 2u);
  EXPECT_EQ(core().registry.find(freed), nullptr);
  EXPECT_EQ(core().budgets.device.held_bytes(0), 2 * kChunk) << "put off, and still counted";
  deallocate(core(), address);  // nothing of it is resident, so it is freed at once
  EXPECT_EQ(core().deferred_frees.count(), 2u);
  core().capture_gate.end_capture();
  EXPECT_TRUE(give_back_caches(core()));
  EXPECT_EQ(core().deferred_frees.count(), 0u);
  EXPECT_EQ(Live::now().reservations, 0u);
}

// As the preload library has them for memory that belongs to the driver.
TEST_F(ThreadsTest, FreesOfALayerAboveAreTriedWithOurs) {
  static size_t waiting = 0;
  static DeferredFrees* frees = nullptr;
  static constexpr MoreFrees kMore{[](bool may_wait) noexcept {
                                     if (waiting == 0 || !frees->try_enter(0, may_wait)) return false;
                                     waiting = 0;
                                     return true;
                                   },
                                   []() noexcept { return waiting; }};
  frees = &core().deferred_frees;
  waiting = 1;
  EXPECT_FALSE(give_back_caches(core())) << "no waiting thread is known";
  frees->retry_also(kMore);
  EXPECT_EQ(frees->count(), 1u);
  core().capture_gate.begin_capture();
  EXPECT_FALSE(give_back_caches(core(), true)) << "it would break the capture";
  core().capture_gate.end_capture();
  {
    const DeferredFrees::Hold hold(*frees, 0);
    EXPECT_FALSE(give_back_caches(core())) << "bytes are on their way";
    EXPECT_TRUE(give_back_caches(core(), true));
  }
  EXPECT_EQ(frees->count(), 0u);
  EXPECT_FALSE(give_back_caches(core()));
}

// A capture that ebbtide was not told of, but that a blocking stream shows.
TEST_F(ThreadsTest, Invariant9_AVisibleCaptureOfTheDriverIsRespected) {
  check(driver().cuCtxSetCurrent(primary_context(0)), "cuCtxSetCurrent");
  const CUdeviceptr address = alloc("w", kChunk);
  CUstream stream = nullptr;
  check(driver().cuStreamCreate(&stream, CU_STREAM_DEFAULT), "cuStreamCreate");
  check(driver().cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
  deallocate(core(), allocate(core(), core().registry.tag("w"), Policy{}, 0, kChunk, stream));
  EXPECT_EQ(core().deferred_frees.count(), 1u);
  EXPECT_THROW(pause(), StateError);
  CUgraph graph = nullptr;
  EXPECT_EQ(driver().cuStreamEndCapture(stream, &graph), CUDA_SUCCESS) << "the capture is whole";
  check(driver().cuGraphDestroy(graph), "cuGraphDestroy");
  check(driver().cuStreamDestroy(stream), "cuStreamDestroy");
  give_back_caches(core());
  EXPECT_EQ(core().deferred_frees.count(), 0u);
  pause();
  deallocate(core(), address);
}

// A stream that does not block the legacy stream shows its capture only to a query of that stream.
TEST_F(ThreadsTest, Invariant9_AnAllocationAsksTheStreamThatItIsGiven) {
  check(driver().cuCtxSetCurrent(primary_context(0)), "cuCtxSetCurrent");
  sim().fail("cuCtxSynchronize", 1, kIllegalAddress, 1);
  deallocate(core(), alloc("w", kChunk));
  sim().clear_failures();
  ASSERT_EQ(core().deferred_frees.count(), 1u);
  CUstream stream = nullptr;
  check(driver().cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  check(driver().cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
  EXPECT_TRUE(is_capture_visible(0, stream));
  EXPECT_FALSE(is_capture_visible(0, nullptr));
  const CUdeviceptr address = allocate(core(), core().registry.tag("w"), Policy{}, 0, kChunk, stream);
  EXPECT_EQ(core().deferred_frees.count(), 1u) << "a deferred free waits for the device, and that breaks a capture";
  CUgraph graph = nullptr;
  EXPECT_EQ(driver().cuStreamEndCapture(stream, &graph), CUDA_SUCCESS) << "the capture is whole";
  check(driver().cuGraphDestroy(graph), "cuGraphDestroy");
  EXPECT_FALSE(is_capture_visible(0, stream));
  check(driver().cuStreamDestroy(stream), "cuStreamDestroy");
  deallocate(core(), address);
  give_back_caches(core());
  EXPECT_EQ(core().deferred_frees.count(), 0u);
}

TEST_F(ThreadsTest, Invariant5_AFreeWaitsForEveryContextThatMayUseTheMemory) {
  const CUdeviceptr address = alloc("w", kChunk);
  // The simulator has only primary contexts, so that of another device stands for a program's own context.
  core().registry.find(address)->other_contexts = {primary_context(1), nullptr};
  sim().clear_log();
  sim().fail("cuCtxSynchronize", 1, kIllegalAddress, 1);
  deallocate(core(), address);
  EXPECT_EQ(core().deferred_frees.count(), 1u) << "a kernel may still touch it";
  EXPECT_EQ(sim().calls("cuCtxSynchronize"), 1u);
  sim().clear_failures();
  EXPECT_TRUE(give_back_caches(core()));
  EXPECT_EQ(sim().calls("cuCtxSynchronize"), 3u) << "its own and the primary one";
  EXPECT_EQ(core().deferred_frees.count(), 0u);
}

// After the wait in another context, the thread cannot go back to the primary one. To wait again would be to wait for
// the wrong device.
TEST_F(ThreadsTest, Invariant5_AFreeIsPutOffWhereItsOwnContextCantBeMadeCurrentAgain) {
  const CUdeviceptr address = alloc("w", kChunk);
  core().registry.find(address)->other_contexts = {primary_context(1), nullptr};
  {
    const ContextScope scope(0);
    sim().fail("cuCtxSetCurrent", 2, kIllegalAddress, 1);  // the first one enters the other context
    deallocate(core(), address);
    sim().clear_failures();
  }
  EXPECT_EQ(core().deferred_frees.count(), 1u) << "a kernel of device 0 may still touch it";
  EXPECT_EQ(Live::now().handles, 1u);
  EXPECT_TRUE(give_back_caches(core()));
  EXPECT_EQ(core().deferred_frees.count(), 0u);
  EXPECT_EQ(Live::now().handles, 0u);
}

TEST_F(ThreadsTest, CapturesBeginAndEndBesideOperationsAndFrees) {
  alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk});
  std::atomic<int> refused{0};
  in_threads(6, [&](int thread) {
    for (int round = 0; round < 15; ++round) {
      if (thread < 2) {
        core().capture_gate.begin_capture();
        deallocate(core(), alloc("c", kChunk));
        core().capture_gate.end_capture();
        give_back_caches(core());
      } else if (thread < 4) {
        try {
          pause({"w"});
          resume({"w"});
        } catch (const StateError&) {
          ++refused;
        }
      } else {
        deallocate(core(), alloc("f", kChunk));
      }
    }
  });
  give_back_caches(core());
  resume();
  EXPECT_EQ(core().deferred_frees.count(), 0u);
  EXPECT_EQ(Live::now().reservations, 1u);
  EXPECT_EQ(core().budgets.device.held_bytes(0), 2 * kChunk);
}

}  // namespace
}  // namespace ebbtide::testing
