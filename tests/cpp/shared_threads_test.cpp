// Frees, allocations and operations at the same time on shared memory.
#include <gtest/gtest.h>

#include <random>

#include "core/operation/pending.h"
#include "threads_fixture.h"

namespace ebbtide::testing {
namespace {

class SharedThreadsTest : public ThreadsTest {
 protected:
  void start() {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      parts_.push_back(alloc("w", kChunk));
      fill(parts_.back(), kChunk, seed);
    }
    pause();
    resume();
    ASSERT_EQ(Live::now().handles, 1u);
  }
  void expect_part(uint64_t index) { EXPECT_TRUE(holds(parts_[index], kChunk, index)); }

  std::vector<CUdeviceptr> parts_;
};

TEST_F(SharedThreadsTest, Invariant12_MemoryFreedInTheMiddleOfAPauseIsGoneAfterIt) {
  start();
  Slow slow("cuMemUnmap", kStand, [&] { pause(); });
  deallocate(core(), parts_[1]);
  const CUdeviceptr fresh = alloc("w", kChunk);
  EXPECT_TRUE(fresh >= parts_[3] + kChunk || fresh + kChunk <= parts_[0]) << "beside all that is still mapped";
  fill(fresh, kChunk, 9);
  EXPECT_TRUE(slow.is_running());
  slow.join();
  EXPECT_EQ(core().budgets.device.held_bytes(0), kChunk);
  resume();
  EXPECT_EQ(core().budgets.device.held_bytes(0), 4 * kChunk);
  for (const uint64_t index : {0, 2, 3}) expect_part(index);
  EXPECT_TRUE(holds(fresh, kChunk, 9));
  expect_no_leak();
}

TEST_F(SharedThreadsTest, Invariant12_AnAllocationFreedInTheMiddleOfAResumeLeavesItsMemoryToTheOthers) {
  start();
  pause();
  {
    Slow slow("cuMemMap", kStand, [&] { resume(); });
    deallocate(core(), parts_[0]);
    deallocate(core(), parts_[2]);
    EXPECT_TRUE(slow.is_running());
  }
  EXPECT_EQ(allocation_count(), 2u);
  EXPECT_EQ(core().budgets.device.held_bytes(0), 4 * kChunk);
  for (const uint64_t index : {1, 3}) expect_part(index);
  deallocate(core(), parts_[1]);
  EXPECT_EQ(core().budgets.device.held_bytes(0), 4 * kChunk);
  deallocate(core(), parts_[3]);
  EXPECT_EQ(core().budgets.device.held_bytes(0), 0u);
  expect_no_leak();
}

TEST_F(SharedThreadsTest, AllThatShareMayBeFreedInTheMiddleOfAResumeInTheBackground) {
  start();
  pause();
  sim().set_delay("ebbtide_deliver", kStand);
  const auto pending = PendingResume::start(claim(OperationKind::kResume));
  for (const CUdeviceptr address : parts_) deallocate(core(), address);
  sim().set_delay("ebbtide_deliver", 0);
  pending->wait();
  BackgroundWork::wait_for_all();
  give_back_caches(core());
  EXPECT_EQ(core().budgets.device.held_bytes(0), 0u);
  EXPECT_EQ(Live::now().reservations, 0u);
}

// A free waits for the device. Allocations that share the handle may be paused meanwhile.
TEST_F(SharedThreadsTest, Invariant12_APauseOfTheOthersInTheMiddleOfAFree) {
  start();
  {
    Slow slow("cuCtxSynchronize", kStand, [&] { deallocate(core(), parts_[1]); });
    pause();
    EXPECT_EQ(core().budgets.device.held_bytes(0), 0u);
    resume();
  }
  EXPECT_EQ(core().budgets.device.held_bytes(0), 3 * kChunk);
  for (const uint64_t index : {0, 2, 3}) expect_part(index);
  expect_no_leak();
}

TEST_F(SharedThreadsTest, SeveralThreadsFreeWhatSharesWhileItLeavesAndReturns) {
  constexpr int kRounds = 12;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<CUdeviceptr> parts;
    for (int index = 0; index < 8; ++index) parts.push_back(alloc("w", kChunk, BackupKind::kNone));
    pause();
    resume();
    in_threads(3, [&](int thread) {
      if (thread == 0) {
        pause();
        resume();
        return;
      }
      for (size_t index = static_cast<size_t>(thread) - 1; index < parts.size(); index += 2) {
        deallocate(core(), parts[index]);
        const CUdeviceptr fresh = alloc("w", kChunk, BackupKind::kNone);
        deallocate(core(), fresh);
      }
    });
    give_back_caches(core());
    EXPECT_EQ(allocation_count(), 0u);
    EXPECT_EQ(core().budgets.device.held_bytes(0), 0u);
    EXPECT_EQ(Live::now().reservations, 0u);
  }
  expect_no_leak();
}

}  // namespace
}  // namespace ebbtide::testing
