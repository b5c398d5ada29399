// The separation of shared handles, beside frees of other threads, and with the peers of the device.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "core/operation/pending.h"
#include "peers_world.h"
#include "threads_fixture.h"

namespace ebbtide::testing {
namespace {

class SeparateThreadsTest : public ThreadsTest {
 protected:
  // Four allocations share a handle. They are separated, slowly, because of the first.
  void start() {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      parts_.push_back(alloc("w", kChunk));
      fill(parts_.back(), kChunk, seed);
    }
    pause();
    resume();
    ASSERT_EQ(Live::now().handles, 1u);
  }
  const std::function<void()> separate_ = [this] {
    OperationRequest request;
    request.tags = {{"w"}, {parts_[0]}, false};
    Operation::claim(core(), OperationKind::kSeparate, request)->commit();
  };

  std::vector<CUdeviceptr> parts_;
};

TEST_F(SeparateThreadsTest, Invariant12_WhatIsFreedInTheMiddleGoesWhenItEnds) {
  for (const char* call : {"cuMemcpyDtoDAsync", "cuMemUnmap", "cuMemMap"}) {
    SCOPED_TRACE(call);
    parts_.clear();
    start();
    {
      Slow slow(call, kStand, separate_);
      deallocate(core(), parts_[0]);
      deallocate(core(), parts_[2]);
      EXPECT_TRUE(slow.is_running());
    }
    EXPECT_EQ(allocation_count(), 2u);
    EXPECT_EQ(core().budgets.device.held_bytes(0), 2 * kChunk);
    for (const uint64_t index : {1, 3}) {
      EXPECT_TRUE(holds(parts_[index], kChunk, index));
      deallocate(core(), parts_[index]);
    }
    EXPECT_EQ(core().budgets.device.held_bytes(0), 0u);
  }
  expect_no_leak();
}

TEST_F(SeparateThreadsTest, Invariant12_AllThatShareMayBeFreedInTheMiddle) {
  start();
  {
    Slow slow("cuMemcpyDtoDAsync", kStand, separate_);
    for (const CUdeviceptr address : parts_) deallocate(core(), address);
    const CUdeviceptr fresh = alloc("w", kChunk);
    EXPECT_TRUE(fresh >= parts_[3] + kChunk || fresh + kChunk <= parts_[0]) << "beside what is still mapped";
    deallocate(core(), fresh);
  }
  EXPECT_EQ(core().budgets.device.held_bytes(0), 0u);
  EXPECT_EQ(Live::now().reservations, 0u);
  expect_no_leak();
}

// A pause and a resume of the whole tag would put them behind one handle again.
TEST_F(SeparateThreadsTest, NoOtherOperationComesBetweenTheSeparationAndThePause) {
  start();
  OperationRequest request;
  request.tags = {{"w"}, {parts_[0]}, false};
  std::unique_ptr<Operation> claimed;
  Slow separating("cuMemcpyDtoDAsync", kStand,
                  [&] { claimed = Operation::claim(core(), OperationKind::kPause, request); });
  std::atomic<bool> is_over{false};
  std::thread other([&] {
    pause();
    resume();
    is_over = true;
  });
  separating.join();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(is_over);
  EXPECT_EQ(Live::now().handles, 4u);
  EXPECT_EQ(claimed->commit().front().totals().bytes, kChunk);
  claimed.reset();
  other.join();
  EXPECT_EQ(Live::now().handles, 1u);
  for (uint64_t index = 0; index < parts_.size(); ++index) EXPECT_TRUE(holds(parts_[index], kChunk, index));
}

// The operation holds them twice: as those that leave, and as those that share.
TEST_F(SeparateThreadsTest, Invariant12_WhatIsFreedWhileAPauseSeparatesGoesWhenItEnds) {
  start();
  OperationRequest request;
  request.tags = {{"w"}, {parts_[0], parts_[1]}, false};
  std::unique_ptr<Operation> claimed;
  {
    Slow slow("cuMemcpyDtoDAsync", kStand, [&] { claimed = Operation::claim(core(), OperationKind::kPause, request); });
    deallocate(core(), parts_[0]);
    deallocate(core(), parts_[2]);
    EXPECT_TRUE(slow.is_running());
  }
  claimed->commit();
  claimed.reset();
  EXPECT_EQ(allocation_count(), 2u);
  EXPECT_EQ(core().budgets.device.held_bytes(0), kChunk);
  EXPECT_TRUE(holds(parts_[3], kChunk, 3));
  resume();
  EXPECT_TRUE(holds(parts_[1], kChunk, 1));
  for (const uint64_t index : {1, 3}) deallocate(core(), parts_[index]);
  EXPECT_EQ(core().budgets.device.held_bytes(0), 0u);
  EXPECT_EQ(Live::now().reservations, 0u);
}

// While bytes are on their way to the device, nothing is freed on it. The shared memory is released when they have
// arrived.
TEST_F(SeparateThreadsTest, Invariant5_BesideAResumeInTheBackground) {
  start();
  const CUdeviceptr other = alloc("other", kChunk);
  fill(other, kChunk, 9);
  pause({"other"});
  sim().set_delay("ebbtide_deliver", kStand);
  const auto pending = PendingResume::start(claim(OperationKind::kResume, {"other"}));
  separate_();
  for (uint64_t index = 0; index < parts_.size(); ++index) EXPECT_TRUE(holds(parts_[index], kChunk, index));
  sim().set_delay("ebbtide_deliver", 0);
  pending->wait();
  BackgroundWork::wait_for_all();
  give_back_caches(core());
  EXPECT_EQ(core().budgets.device.held_bytes(0), 5 * kChunk);
  EXPECT_EQ(Live::now().handles, 5u);
  EXPECT_TRUE(holds(other, kChunk, 9));
  for (const CUdeviceptr address : parts_) deallocate(core(), address);
  EXPECT_EQ(core().budgets.device.held_bytes(0), kChunk);
}

class SeparatePeersTest : public PeersWorld {
 protected:
  std::vector<CUdeviceptr> make_three() {
    std::vector<CUdeviceptr> parts;
    for (int index = 0; index < 3; ++index) parts.push_back(alloc("w", kChunk));
    for (const CUdeviceptr address : parts) fill(address, kChunk, address);
    pause();
    resume();
    EXPECT_EQ(Live::now().handles, 1u);
    return parts;
  }
  void separate(CUdeviceptr address) {
    OperationRequest request;
    request.tags = {{"w"}, {address}, false};
    Operation::claim(core(), OperationKind::kSeparate, request)->commit();
    EXPECT_EQ(Live::now().handles, 3u);
  }
};

TEST_F(SeparatePeersTest, PeersUseWhatWasSeparated) {
  const auto parts = make_three();
  separate(parts[1]);
  const CUdeviceptr elsewhere = alloc("x", kChunk, BackupKind::kRam, 1);
  for (const CUdeviceptr address : parts) {
    EXPECT_TRUE(is_usable_by_all(address));
    copy_to(elsewhere, address, kChunk, 1);
    EXPECT_TRUE(holds(elsewhere, kChunk, address));
  }
}

TEST_F(SeparatePeersTest, ADeviceThatWakesLaterGetsAccessToEach) {
  start_with_one();
  const auto parts = make_three();
  separate(parts[1]);
  EXPECT_FALSE(is_usable_by(1, parts[1]));
  set_alive(1, true);
  sim().clear_log();
  core().peers.refresh(true);
  EXPECT_EQ(sim().calls("cuMemSetAccess"), 3u);
  for (const CUdeviceptr address : parts) EXPECT_TRUE(is_usable_by_all(address));
}

TEST_F(SeparatePeersTest, APeerThatIsRefusedIsGrantedAccessLater) {
  const auto parts = make_three();
  sim().fail("cuMemSetAccess", 4, kOther, 1);  // the first three map the spare range
  sim().fail("cuMemSetAccess", 6, kOther, 1);  // after the own device got access
  separate(parts[1]);
  sim().clear_failures();
  for (const CUdeviceptr address : parts) EXPECT_TRUE(is_usable_by(0, address) && holds(address, kChunk, address));
  core().peers.refresh(true);
  for (const CUdeviceptr address : parts) EXPECT_TRUE(is_usable_by_all(address));
}

}  // namespace
}  // namespace ebbtide::testing
