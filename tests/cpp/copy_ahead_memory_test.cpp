// The memory that copies ahead take, and what they hold up: others get it where they need it.
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "base/error.h"
#include "core/operation/ahead.h"
#include "driver/context.h"
#include "driver/device_kernels.h"
#include "driver/stream.h"
#include "threads_fixture.h"

namespace ebbtide::testing {
namespace {

class CopyAheadMemory : public ThreadsTest {
 protected:
  uint64_t copy_all(const std::string& tag, uint64_t step_bytes = 64 * kMiB) {
    AheadProgress progress{.step_bytes = step_bytes, .threads = 1};
    uint64_t copied = 0;
    while (!progress.is_over) {
      const auto report = copy_ahead(core(), tag, progress);
      if (!report) throw StateError("a capture is under way");
      copied += report->totals().copied;
    }
    return copied;
  }
  CUdeviceptr make(const std::string& tag, size_t blocks, uint64_t seed, const Policy& policy = {}) {
    const CUdeviceptr address = allocate(core(), core().registry.tag(tag), policy, 0, blocks * kChunk);
    fill(address, blocks * kChunk, seed);
    return address;
  }
  HostBudget& host() { return core().budgets.host; }
};

// --- device memory that is freed beside a step ---------------------------------------------------------------------

TEST_F(CopyAheadMemory, Invariant12_WhoeverNeedsWhatWasFreedBesideAStepGetsItAtItsEnd) {
  const CUdeviceptr freed = make("w", 2, 1);
  core().budgets.device.set_limit(2 * kChunk);
  Slow slow("cuMemcpyDtoHAsync", kStand, [&] { copy_all("w"); });
  deallocate(core(), freed);
  ASSERT_TRUE(slow.is_running()) << "a free does not wait";
  const CUdeviceptr next = alloc("other", 2 * kChunk);
  EXPECT_EQ(core().counters.alloc_failures.load(), 0u);
  slow.join();
  deallocate(core(), next);
  EXPECT_FALSE(core().registry.ahead_steps.wait(AheadSteps::Which::kAll)) << "none is left";
}

TEST_F(CopyAheadMemory, WhatTheDeviceCanHoldAtTheEndOfAStepDoesNotSpill) {
  core().rules.overflow.reserve_bytes = 0;
  const CUdeviceptr freed = make("w", 2, 1);
  core().budgets.device.set_limit(2 * kChunk);
  Slow slow("cuMemcpyDtoHAsync", kStand, [&] { copy_all("w"); });
  deallocate(core(), freed);
  const Policy split = {BackupKind::kRam, false, Overflow::kSplit, false};
  const CUdeviceptr next = allocate(core(), core().registry.tag("other"), split, 0, 2 * kChunk);
  EXPECT_EQ(core().registry.find(next)->host_bytes(), 0u);
}

TEST_F(CopyAheadMemory, ALackThatAStepCannotMendIsToldAtOnce) {
  make("w", 2, 1);
  core().budgets.device.set_limit(2 * kChunk);
  Slow slow("cuMemcpyDtoHAsync", kStand, [&] { copy_all("w"); });
  EXPECT_THROW(alloc("other", kChunk), OutOfMemory);
  EXPECT_TRUE(slow.is_running()) << "nothing was freed: nobody waits";
}

// --- host memory of copies -----------------------------------------------------------------------------------------

TEST_F(CopyAheadMemory, TheCopiesOfOneTagGiveWayToThePauseOfAnother) {
  for (const BackupKind kind : {BackupKind::kRam, BackupKind::kPinned}) {
    const CUdeviceptr ahead = make("w", 6, 1, {.backup = kind});
    const CUdeviceptr more = make("w", 2, 2, {.backup = kind});
    const CUdeviceptr other = make("other", 6, 3);
    copy_all("w");
    host().set_limit(host().held_bytes() + kChunk);
    EXPECT_EQ(pause({"other"}).totals().copied, 6 * kChunk);
    EXPECT_EQ(amounts("w").ahead_bytes, 2 * kChunk) << "no more than was needed";
    resume({"other"});
    EXPECT_TRUE(holds(other, 6 * kChunk, 3));
    host().set_limit(kUnlimited);
    EXPECT_EQ(pause({"w"}).totals().copied, 6 * kChunk);
    resume({"w"});
    EXPECT_TRUE(holds(ahead, 6 * kChunk, 1));
    EXPECT_TRUE(holds(more, 2 * kChunk, 2));
    for (const CUdeviceptr address : {ahead, more, other}) deallocate(core(), address);
  }
}

TEST_F(CopyAheadMemory, APauseWaitsForTheStepWhoseMemoryItNeeds) {
  make("w", 4, 1);
  const CUdeviceptr other = make("other", 4, 2);
  copy_all("other");  // which makes a ring
  pause({"other"});
  resume({"other"});
  host().set_limit(host().held_bytes() + 4 * kChunk);
  Slow slow("cuMemcpyDtoHAsync", kStand / 4, [&] { copy_all("w"); });
  EXPECT_EQ(pause({"other"}).totals().copied, 4 * kChunk);
  slow.join();
  EXPECT_EQ(amounts("w").ahead_bytes, 0u);
  resume({"other"});
  EXPECT_TRUE(holds(other, 4 * kChunk, 2));
}

TEST_F(CopyAheadMemory, NothingGivesWayToOtherCopiesAheadNorWhatWasAskedFor) {
  make("w", 4, 1);
  make("other", 4, 2);
  make("kept", 4, 3, {.retain = true});
  copy_all("w");
  pause({"kept"});
  resume({"kept"});
  const uint64_t held = host().held_bytes();
  host().set_limit(held);
  EXPECT_THROW(copy_all("other"), StoreError);
  EXPECT_EQ(amounts("w").ahead_bytes, 4 * kChunk);
  EXPECT_EQ(pause({"other"}).totals().copied, 4 * kChunk);
  EXPECT_EQ(amounts("w").ahead_bytes, 0u);
  EXPECT_EQ(amounts("kept").ahead_bytes, 4 * kChunk);
  EXPECT_THROW(pause({"w"}), StoreError) << "the region asked for the memory of 'kept'";
}

TEST_F(CopyAheadMemory, WhatSomebodyNeedsIsNotTakenForCopiesMeanwhile) {
  class Meanwhile final : public IdleMemory {
   public:
    explicit Meanwhile(HostBudget& budget) : budget_(budget) {}
    bool give_way(uint64_t /*bytes*/) noexcept override {
      budget_.set_limit(kUnlimited);
      EXPECT_THROW(budget_.charge_spare(kChunk, "copies"), StoreError);
      return true;
    }

   private:
    HostBudget& budget_;
  };
  HostBudget budget;
  Meanwhile meanwhile(budget);
  budget.set_spare(&meanwhile);
  budget.set_limit(0);
  EXPECT_EQ(budget.charge(kChunk, "a pause").size_bytes(), kChunk);
  EXPECT_EQ(budget.charge_spare(kChunk, "copies").size_bytes(), kChunk);
}

// --- resumes that keep the backup ----------------------------------------------------------------------------------

TEST_F(CopyAheadMemory, WhereItIsKeptAheadAResumeKeepsTheBackup) {
  core().rules.keeps_ahead = true;
  const CUdeviceptr address = make("w", 4, 1);
  pause();
  resume();
  EXPECT_EQ(amounts("w").ahead_bytes, 4 * kChunk);
  fill(address, kChunk, 2);
  EXPECT_EQ(copy_all("w"), kChunk) << "only what has changed";
  EXPECT_EQ(pause().totals().copied, 0u);
  OperationRequest request;
  request.retain = false;
  Operation::claim(core(), OperationKind::kResume, std::move(request))->commit();
  EXPECT_EQ(amounts("w").retained_bytes, 0u) << "the caller said so";
  pause({}, BackupKind::kDisk);
  resume();
  EXPECT_EQ(amounts("w").retained_bytes, 0u) << "the next pause makes another kind";
  EXPECT_TRUE(holds(address, kChunk, 2));
}

TEST_F(CopyAheadMemory, ABackupThatAResumeKeptOnlyForThatGivesWayToo) {
  core().rules.keeps_ahead = true;
  const CUdeviceptr address = make("w", 4, 1);
  make("other", 4, 2);
  pause({"w"});
  resume({"w"});
  host().set_limit(host().held_bytes());
  EXPECT_EQ(pause({"other"}).totals().copied, 4 * kChunk);
  EXPECT_EQ(amounts("w").ahead_bytes, 0u);
  EXPECT_THROW(pause({"w"}), StoreError);
  EXPECT_TRUE(holds(address, 4 * kChunk, 1));
}

// --- what the pause needs beside ------------------------------------------------------------------------------------

TEST_F(CopyAheadMemory, ThePausePinsNothingThatTheCopiesDidNot) {
  const int cores = usable_cores();
  if (cores < 2) GTEST_SKIP() << "a pause would use one thread, too, and the same ring";
  make("w", 40, 1);
  copy_all("w", 2 * kMiB);
  const uint64_t held = core().engines.held_bytes();
  sim().clear_log();
  EXPECT_EQ(pause().totals().copied, 0u);
  EXPECT_EQ(core().engines.held_bytes(), held);
  EXPECT_EQ(sim().calls("cuMemHostRegister") + sim().calls("cuMemHostAlloc"), 0u);
}

// --- captures --------------------------------------------------------------------------------------------------------

TEST_F(CopyAheadMemory, Invariant9_ACaptureThatNobodyToldOfGoesOn) {
  const ContextScope scope(0);
  const Stream stream = Stream::create();
  for (const BackupKind kind : {BackupKind::kRam, BackupKind::kPinned, BackupKind::kDisk}) {
    for (const int threads : {1, 0}) {  // 0: several
      make("w", 8, 1, {.backup = kind});
      DeviceKernels::forget_all();
      core().engines.trim();
      check(driver().cuStreamBeginCapture(stream.get(), CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
      in_threads(1, [&](int) {
        AheadProgress progress{.step_bytes = 4 * kChunk, .threads = threads};
        while (!progress.is_over) ASSERT_TRUE(copy_ahead(core(), "w", progress));
      });
      CUgraph graph = nullptr;
      EXPECT_EQ(driver().cuStreamEndCapture(stream.get(), &graph), CUDA_SUCCESS) << static_cast<int>(kind);
      EXPECT_EQ(driver().cuGraphDestroy(graph), CUDA_SUCCESS);
      EXPECT_EQ(pause().totals().copied, 0u);
      resume();
    }
  }
}

}  // namespace
}  // namespace ebbtide::testing
