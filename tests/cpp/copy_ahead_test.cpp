// Copies ahead of a pause: memory in use goes to its backup in steps, and the pause copies later changes.
#include "core/operation/ahead.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>

#include "api/ebbtide.h"
#include "base/error.h"
#include "core/operation/backup_view.h"
#include "driver/device_kernels.h"
#include "moves_faults.h"
#include "threads_fixture.h"

namespace ebbtide::testing {
namespace {

// What all steps together did, in steps of this size.
struct Ahead {
  uint64_t copied = 0, clean = 0, constant = 0;
  size_t steps = 0;
  std::string note;
};

Ahead copy_all(Core& core, const std::string& tag, uint64_t step_bytes = 64 * kMiB, int threads = 0) {
  AheadProgress progress{.step_bytes = step_bytes, .threads = threads};
  Ahead all;
  while (!progress.is_over) {
    const auto report = copy_ahead(core, tag, progress);
    if (!report) throw StateError("a capture is under way");
    const ReportRow done = report->totals();
    EXPECT_LE(done.copied, step_bytes);
    all.copied += done.copied;
    all.clean += done.clean;
    all.constant += done.constant;
    all.note += report->note;
    if (++all.steps > 1000) throw StateError("it never ends");
  }
  return all;
}

class CopyAheadTest : public CoreTest, public ::testing::WithParamInterface<BackupKind> {
 protected:
  CUdeviceptr make(size_t blocks, uint64_t seed, const std::string& tag = "w") {
    const CUdeviceptr address = alloc_chunks(tag, Policy{GetParam()}, 0, std::vector<uint64_t>(blocks, kChunk));
    fill(address, blocks * kChunk, seed);
    return address;
  }
};

TEST_P(CopyAheadTest, TheFirstPauseCopiesNothing) {
  const CUdeviceptr address = make(5, 1);
  const Ahead ahead = copy_all(core(), "w");
  EXPECT_EQ(ahead.copied, 5 * kChunk);
  EXPECT_EQ(ahead.note, "");
  EXPECT_EQ(amounts("w").ahead_bytes, 5 * kChunk);
  EXPECT_EQ(resident_bytes("w"), 5 * kChunk);
  const ReportRow paused = pause().totals();
  EXPECT_EQ(paused.copied, 0u);
  EXPECT_EQ(paused.clean, 5 * kChunk);
  EXPECT_EQ(amounts("w").ahead_bytes, 0u);
  resume();
  EXPECT_TRUE(holds(address, 5 * kChunk, 1));
  deallocate(core(), address);
}

TEST_P(CopyAheadTest, WhatChangesAfterwardsIsCopiedByThePause) {
  const CUdeviceptr address = make(4, 1);
  copy_all(core(), "w");
  fill(address + 2 * kChunk, kChunk, 9);
  const ReportRow paused = pause().totals();
  EXPECT_EQ(paused.copied, kChunk);
  EXPECT_EQ(paused.clean, 3 * kChunk);
  const auto verdicts = core().registry.find(address)->verdicts;
  EXPECT_EQ((*verdicts)[2], Verdict::kChanged);
  resume();
  EXPECT_TRUE(holds(address, 2 * kChunk, 1));
  EXPECT_TRUE(holds(address + 2 * kChunk, kChunk, 9));
}

TEST_P(CopyAheadTest, StepsGoOnWhereTheLastOneEnded) {
  make(3, 1);
  make(4, 2);
  const Ahead ahead = copy_all(core(), "w", kChunk);
  EXPECT_EQ(ahead.copied, 7 * kChunk);
  EXPECT_GE(ahead.steps, 7u);
  EXPECT_EQ(copy_all(core(), "w").clean, 7 * kChunk) << "a second pass compares, and copies nothing";
  EXPECT_EQ(pause().totals().copied, 0u);
}

TEST_P(CopyAheadTest, WhatAStepGaveUpOrGotMeanwhileIsLookedAtOnce) {
  const CUdeviceptr first = make(2, 1);
  make(2, 2);
  AheadProgress progress{.step_bytes = kChunk};
  ASSERT_TRUE(copy_ahead(core(), "w", progress));
  deallocate(core(), first);
  const CUdeviceptr last = make(2, 3);
  uint64_t copied = 0;
  while (!progress.is_over) copied += copy_ahead(core(), "w", progress)->totals().copied;
  EXPECT_EQ(copied, 4 * kChunk);
  EXPECT_EQ(pause().totals().copied, 0u);
  resume();
  EXPECT_TRUE(holds(last, 2 * kChunk, 3));
}

TEST_P(CopyAheadTest, APauseInTheMiddleTakesOverTheCopies) {
  const CUdeviceptr address = make(6, 1);
  AheadProgress progress{.step_bytes = 2 * kChunk};
  ASSERT_TRUE(copy_ahead(core(), "w", progress));
  const ReportRow paused = pause().totals();
  EXPECT_EQ(paused.clean, 2 * kChunk);
  EXPECT_EQ(paused.copied, 4 * kChunk);
  EXPECT_EQ(copy_ahead(core(), "w", progress)->totals().copied, 0u);
  EXPECT_TRUE(progress.is_over) << "nothing of it is resident";
  resume();
  EXPECT_TRUE(holds(address, 6 * kChunk, 1));
}

TEST_P(CopyAheadTest, BlocksOfOneValueAreNotCopied) {
  const CUdeviceptr address = make(3, 1);
  std::memset(reinterpret_cast<void*>(address + kChunk), 7, kChunk);
  const Ahead ahead = copy_all(core(), "w");
  EXPECT_EQ(ahead.copied, 2 * kChunk);
  EXPECT_EQ(ahead.constant, kChunk);
  const ReportRow paused = pause().totals();
  EXPECT_EQ(paused.constant, kChunk);
  EXPECT_EQ(paused.copied, 0u);
  resume();
  std::vector<unsigned char> sevens(kChunk, 7);
  EXPECT_EQ(std::memcmp(reinterpret_cast<void*>(address + kChunk), sevens.data(), kChunk), 0);
}

// A digest of the device's bytes, before and after, would be taken in by a block that changes and changes back. To
// ThreadSanitizer the simulated kernel and the copy are a race of the test.
#if !defined(__SANITIZE_THREAD__)
TEST_P(CopyAheadTest, BytesThatAreWrittenMeanwhileComeBackRight) {
  sim().set_async(EBBTIDE_SIM_LATE, 0);
  const CUdeviceptr address = make(4, 1);
  for (uint64_t round = 0; round < 12; ++round) {
    std::atomic<bool> must_end = false;
    std::thread writing([&] {
      // The same two contents by turns, and at the end the first.
      do {
        fill(address + kChunk, kChunk, 100 + round);
        fill(address + kChunk, kChunk, round);
      } while (!must_end);
    });
    copy_all(core(), "w", kChunk);
    must_end = true;
    writing.join();
    pause();
    resume();
    EXPECT_TRUE(holds(address + kChunk, kChunk, round));
  }
}

#endif

TEST_P(CopyAheadTest, NothingIsDoneWhileACaptureIsUnderWay) {
  make(2, 1);
  AheadProgress progress;
  core().capture_gate.begin_capture();
  const uint64_t failures = core().counters.operation_failures.load();
  EXPECT_FALSE(copy_ahead(core(), "w", progress));
  EXPECT_FALSE(progress.is_over);
  EXPECT_EQ(core().counters.operation_failures.load(), failures);
  core().capture_gate.end_capture();
  EXPECT_EQ(copy_ahead(core(), "w", progress)->totals().copied, 2 * kChunk);
}

TEST_P(CopyAheadTest, ViewedMemoryIsLeftAlone) {
  const CUdeviceptr address =
      allocate(core(), core().registry.tag("w"), {.backup = GetParam(), .retain = true}, 0, 2 * kChunk);
  fill(address, 2 * kChunk, 1);
  pause();
  for (const ViewKind kind : {ViewKind::kSnapshot, ViewKind::kWindow}) {
    const auto view = view_backup(core(), {address, 2 * kChunk}, kind);
    ASSERT_TRUE(view);
    resume();
    fill(address, 2 * kChunk, 2);
    EXPECT_EQ(copy_all(core(), "w").copied, kind == ViewKind::kSnapshot ? 2 * kChunk : 0u)
        << "a resume leaves a snapshot behind, and a new backup is made";
    EXPECT_TRUE(holds(reinterpret_cast<CUdeviceptr>(view->bytes()), 2 * kChunk, 1));
    pause();
    resume();
    EXPECT_TRUE(holds(address, 2 * kChunk, 2));
    fill(address, 2 * kChunk, 1);
    pause();
  }
}

TEST_P(CopyAheadTest, OnlyWhatChangedSinceAResumeThatRetainedItIsCopied) {
  const CUdeviceptr address =
      allocate(core(), core().registry.tag("w"), {.backup = GetParam(), .retain = true}, 0, 4 * kChunk);
  fill(address, 4 * kChunk, 1);
  pause();
  resume();
  fill(address, kChunk, 2);
  const Ahead ahead = copy_all(core(), "w");
  EXPECT_EQ(ahead.copied, kChunk);
  EXPECT_EQ(ahead.clean, 3 * kChunk);
  EXPECT_FALSE(view_backup(core(), {address, kChunk}, ViewKind::kWindow))
      << "these are not the bytes of the last pause";
  EXPECT_TRUE(view_backup(core(), {address + kChunk, 3 * kChunk}, ViewKind::kWindow));
  EXPECT_LE(pause().totals().copied, 3 * kChunk);
  resume();
  EXPECT_TRUE(holds(address, kChunk, 2));
}

TEST_P(CopyAheadTest, FreedMemoryGivesItsCopyBack) {
  const uint64_t before = core().budgets.host.held_bytes();
  const CUdeviceptr address = make(3, 1);
  copy_all(core(), "w");
  deallocate(core(), address);
  core().engines.trim();
  EXPECT_EQ(core().budgets.host.held_bytes(), before);
  EXPECT_EQ(core().budgets.pinned.held_bytes(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Kinds, CopyAheadTest,
                         ::testing::Values(BackupKind::kRam, BackupKind::kPinned, BackupKind::kDisk));

class CopyAheadRules : public CoreTest {};

TEST_F(CopyAheadRules, UnusedMemoryIsLeftToThePause) {
  const CUdeviceptr address = alloc("w", 4 * kChunk);
  fill(address, 4 * kChunk, 1);
  AheadProgress progress;
  const ReportRow done = copy_ahead(core(), "w", progress, AddressRanges({{address + kChunk, 2 * kChunk}}))->totals();
  EXPECT_EQ(done.copied, 2 * kChunk);
  EXPECT_EQ(done.unused, 2 * kChunk);
  EXPECT_TRUE(progress.is_over);
  EXPECT_EQ(pause().totals().copied, 2 * kChunk) << "it may be in use by now";
  resume();
  EXPECT_TRUE(holds(address, 4 * kChunk, 1));
}

TEST_F(CopyAheadRules, WhatHasNoBackupIsAwayOrOnTheHostIsLeftOut) {
  const CUdeviceptr dropped = alloc("w", 2 * kChunk, BackupKind::kNone);
  const CUdeviceptr away = alloc("w", 2 * kChunk);
  fill(dropped, 2 * kChunk, 1);
  fill(away, 2 * kChunk, 2);
  OperationRequest request;
  request.tags.names = {"w"};
  request.tags.addresses = {away};
  Operation::claim(core(), OperationKind::kPause, std::move(request))->commit();
  const Ahead ahead = copy_all(core(), "w");
  EXPECT_EQ(ahead.copied, 0u);
  EXPECT_EQ(ahead.steps, 1u);
  EXPECT_EQ(core().registry.find(dropped)->stored, nullptr);
  EXPECT_THROW(copy_all(core(), "never"), StateError);
}

TEST_F(CopyAheadRules, DevicesAreServedOneAfterTheOther) {
  for (const int device : {0, 1, 0, 1}) {
    const CUdeviceptr address = alloc("w", 2 * kChunk, BackupKind::kRam, device);
    fill(address, 2 * kChunk, static_cast<uint64_t>(device));
  }
  EXPECT_EQ(copy_all(core(), "w").copied, 8 * kChunk);
  EXPECT_EQ(pause().totals().copied, 0u);
}

TEST_F(CopyAheadRules, NothingIsCopiedWhereAPauseWouldNotCompare) {
  fill(alloc("w", 2 * kChunk), 2 * kChunk, 1);
  core().rules.skip.clean.store(false);
  const Ahead ahead = copy_all(core(), "w");
  EXPECT_EQ(ahead.copied, 0u);
  EXPECT_NE(ahead.note.find("skip_clean"), std::string::npos);
  core().rules.skip.clean.store(true);
  EXPECT_EQ(copy_all(core(), "w").copied, 2 * kChunk);
}

TEST_F(CopyAheadRules, ADeviceWithoutKernelsIsPassedOver) {
  for (const int device : {0, 1, 0}) fill(alloc("w", 2 * kChunk, BackupKind::kRam, device), 2 * kChunk, 1);
  DeviceKernels::forget_all();
  sim().fail("cuModuleLoadData", 1, CUDA_ERROR_NOT_SUPPORTED, 1);
  const Ahead ahead = copy_all(core(), "w");
  EXPECT_EQ(ahead.copied, 2 * kChunk) << "of device 1";
  EXPECT_NE(ahead.note.find("from device 0"), std::string::npos);
  DeviceKernels::forget_all();
}

TEST_F(CopyAheadRules, AHostThatIsTooSmallRefusesAndKeepsTheCopies) {
  const CUdeviceptr address = alloc("w", 8 * kChunk);
  fill(address, 8 * kChunk, 1);
  copy_all(core(), "w", kChunk * 2, 1);  // which makes the ring
  pause();
  resume();
  const uint64_t held = core().budgets.host.held_bytes();
  core().budgets.host.set_limit(held + 3 * kChunk);
  AheadProgress progress{.step_bytes = 2 * kChunk, .threads = 1};
  ASSERT_TRUE(copy_ahead(core(), "w", progress));
  EXPECT_THROW(copy_ahead(core(), "w", progress), StoreError);
  EXPECT_EQ(amounts("w").ahead_bytes, 2 * kChunk);
  core().budgets.host.set_limit(kUnlimited);
  while (!progress.is_over) copy_ahead(core(), "w", progress);
  EXPECT_EQ(amounts("w").ahead_bytes, 8 * kChunk);
  EXPECT_EQ(pause().totals().copied, 0u);
}

TEST_F(CopyAheadRules, TheCApiTakesSteps) {
  ebbtide_ahead progress = EBBTIDE_AHEAD_INIT;
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  EXPECT_EQ(ebbtide_copy_ahead(nullptr, &progress, nullptr, &error), EBBTIDE_INVALID_ARGUMENT);
  EXPECT_EQ(ebbtide_copy_ahead("w", nullptr, nullptr, &error), EBBTIDE_INVALID_ARGUMENT);
  progress.step_bytes = 1;
  EXPECT_EQ(ebbtide_copy_ahead("w", &progress, nullptr, &error), EBBTIDE_INVALID_ARGUMENT);
  progress.step_bytes = 32 * kMiB;
  progress.threads = -1;
  EXPECT_EQ(ebbtide_copy_ahead("w", &progress, nullptr, &error), EBBTIDE_INVALID_ARGUMENT);
}

// --- faults --------------------------------------------------------------------------------------------------------

class CopyAheadFaults : public MovesFaults {
 protected:
  void sweep_steps(const std::vector<ItemSpec>& items, const Act& prepare) {
    const auto steps = [&] { copy_all(core(), "w", 2 * kChunk); };
    sweep_all({items, prepare, steps, {steps, [&] { pause(); }, [&] { resume(); }}});
  }
};

TEST_F(CopyAheadFaults, Invariant3_OfBackupsInMemory) {
  sweep_steps({{"w", kRam, 0, {1, 1}}, {"w", kPinned, 0, {2}}, {"w", kRetained, 1, {4}}},
              [&] { make_second_cycle(2); });
}
TEST_F(CopyAheadFaults, Invariant3_OfBackupsOnDisk) {
  sweep_steps({{"w", kDisk, 0, {2}}, {"w", kRetainedDisk, 0, {4}}}, [&] { make_second_cycle(1); });
}

// --- threads -------------------------------------------------------------------------------------------------------

class CopyAheadThreads : public ThreadsTest {};

TEST_F(CopyAheadThreads, BesidePausesResumesAndFrees) {
  sim().set_async(EBBTIDE_SIM_RANDOM, 5);
  const CUdeviceptr first = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk});
  const CUdeviceptr second = alloc_chunks("w", BackupKind::kPinned, 0, {kChunk, kChunk});
  fill(first, 2 * kChunk, 1);
  fill(second, 2 * kChunk, 2);
  std::atomic<int> running = 2;
  in_threads(3, [&](int thread) {
    if (thread == 0) {
      while (running > 0) copy_all(core(), "w", kChunk, 1);
      return;
    }
    for (int round = 0; round < 15; ++round) {
      if (thread == 1) {
        pause({"w"});
        resume({"w"});
      } else {
        const CUdeviceptr short_lived = alloc("w", 2 * kChunk);
        deallocate(core(), short_lived);
      }
    }
    --running;
  });
  resume();
  EXPECT_TRUE(holds(first, 2 * kChunk, 1));
  EXPECT_TRUE(holds(second, 2 * kChunk, 2));
}

}  // namespace
}  // namespace ebbtide::testing
