// Moves of shared memory: swaps, resumes in a given order and in the background, every store, peers.
#include <gtest/gtest.h>

#include "base/error.h"
#include "core/operation/pending.h"
#include "driver/context.h"
#include "driver/stream.h"
#include "peers_world.h"
#include "policy/chunking.h"
#include "shared_fixture.h"
#include "store_fixture.h"

namespace ebbtide::testing {
namespace {

class SharedMovesTest : public SharedTest {};

TEST_F(SharedMovesTest, EveryStoreGivesBackTheBytesOfWhatSharesRetainedOrNot) {
  const DiskDirectory directory;
  for (const BackupKind kind : {BackupKind::kRam, BackupKind::kPinned, BackupKind::kDisk}) {
    for (const bool retain : {false, true}) {
      const auto parts = make("w", 3, {kind, retain});
      come_back();
      EXPECT_EQ(handles(), 1u);
      const bool is_kept = retain || kind == BackupKind::kPinned;
      const ReportRow unchanged = pause().totals();
      EXPECT_EQ(unchanged.clean, is_kept ? 3 * kChunk : 0);
      EXPECT_EQ(unchanged.bytes, 3 * kChunk);
      resume();
      expect_whole(parts);
      write(parts[1], kChunk);
      const ReportRow changed = pause().totals();
      EXPECT_EQ(changed.copied, is_kept ? kChunk : 3 * kChunk);
      resume();
      expect_whole(parts);
      EXPECT_EQ(handles(), 1u);
      free_all(parts);
    }
  }
  expect_no_leak();
}

TEST_F(SharedMovesTest, BackupRefusedThisOnceDropsAllThatShare) {
  const auto parts = make("w", 3, {BackupKind::kRam, true});
  come_back();
  EXPECT_EQ(pause({}, BackupKind::kNone).totals().bytes, 3 * kChunk);
  expect_device_bytes(0);
  resume();
  for (const CUdeviceptr address : parts) {
    EXPECT_TRUE(is_zero(address, kChunk));
    write(address, kChunk);
  }
  come_back();
  expect_whole(parts);
}

TEST_F(SharedMovesTest, WhatComesFirstBringsItsNeighboursMemoryAlong) {
  const auto parts = make("w", 6);
  core().rules.shared_handle_bytes = 2 * kChunk;
  pause();
  sim().clear_log();
  claim_in_order({parts[5], parts[0], parts[3]})->commit();
  EXPECT_EQ(sim().calls("cuMemMap"), 3u);
  EXPECT_EQ(handles(), 3u);
  expect_whole(parts);
  core().rules.shared_handle_bytes = kGiB;
  pause();
  claim_in_order({parts[4], parts[2]})->commit();
  EXPECT_EQ(handles(), 1u);
  expect_whole(parts);
}

TEST_F(SharedMovesTest, InTheBackgroundBytesArriveOneByOneInOrder) {
  const auto parts = make("w", 4);
  pause();
  const ContextScope scope(0);
  const Stream stream = Stream::create();
  const auto pending = PendingResume::start(claim_in_order({parts[2]}));
  EXPECT_EQ(handles(), 1u);
  pending->stream_wait(0, stream.get(), {{parts[2], 8}});
  stream.synchronize();
  EXPECT_TRUE(is_whole(parts[2]));
  EXPECT_TRUE(pending->is_ready({parts[2], kChunk}));
  EXPECT_EQ(pending->wait().totals().bytes, 4 * kChunk);
  expect_whole(parts);
  expect_device_bytes(4 * kChunk);
}

TEST_F(SharedMovesTest, Invariant3_ABackgroundResumeThatFailsLeavesAllOfAHandleAway) {
  const auto parts = make("w", 4);
  for (const char* call : {"cuStreamQuery", "cuMemMap", "cuMemSetAccess", "cuLaunchKernel"}) {
    SCOPED_TRACE(call);
    pause();
    sim().fail(call, 1, 999, 2);  // access is requested again without the peers
    EXPECT_THROW(PendingResume::start(claim_in_order({parts[3], parts[1]}))->wait(), DriverError);
    sim().clear_failures();
    give_back_caches(core());
    const bool is_any_back = resident_bytes("w") > 0;
    EXPECT_EQ(resident_bytes("w"), is_any_back ? 4 * kChunk : 0) << "all or none";
    expect_device_bytes(resident_bytes("w"));
    PendingResume::start(claim_in_order({parts[3], parts[1]}))->wait();
    expect_whole(parts);
    expect_device_bytes(4 * kChunk);
  }
}

TEST_F(SharedMovesTest, PeersUseSharedMemory) {
  // Adjacent to allocations that were never paused and have handles of their own.
  const auto parts = make("w", 3);
  come_back();
  const auto fresh = make("w", 1);
  for (const CUdeviceptr address : {parts[0], parts[1], parts[2], fresh[0]}) {
    for (int device = 0; device < kDevices; ++device) {
      unsigned long long flags = 0;
      const CUmemLocation location{CU_MEM_LOCATION_TYPE_DEVICE, device};
      check(driver().cuMemGetAccess(&flags, &location, address), "cuMemGetAccess");
      EXPECT_EQ(flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    }
  }
}

class SharedPeersTest : public PeersWorld {};

TEST_F(SharedPeersTest, ADeviceThatWakesLaterGetsAccessToSharedMemoryOnce) {
  start_with_one();
  std::vector<CUdeviceptr> parts;
  for (int index = 0; index < 3; ++index) parts.push_back(alloc("w", kChunk));
  for (const CUdeviceptr address : parts) fill(address, kChunk, 1);
  pause();
  resume();
  EXPECT_EQ(Live::now().handles, 1u);
  EXPECT_FALSE(is_usable_by(1, parts[1]));
  deallocate(core(), parts[0]);
  set_alive(1, true);
  sim().clear_log();
  core().peers.refresh(true);
  EXPECT_EQ(sim().calls("cuMemSetAccess"), 1u) << "for all that share";
  for (const size_t index : {1, 2}) EXPECT_TRUE(is_usable_by_all(parts[index]));
  pause();
  resume();
  for (const size_t index : {1, 2}) {
    EXPECT_TRUE(is_usable_by_all(parts[index]));
    EXPECT_TRUE(holds(parts[index], kChunk, 1));
  }
}

// Two tags of six allocations of 32 MiB each. The first block of each has content.
class SharedSwapTest : public SharedTest {
 protected:
  static constexpr uint64_t kPart = 32 * kMiB;
  static constexpr uint64_t kTagBytes = 6 * kPart;

  std::vector<CUdeviceptr> make_large(const std::string& tag, uint64_t seed) {
    std::vector<CUdeviceptr> parts;
    for (uint64_t index = 0; index < 6; ++index) parts.push_back(alloc(tag, kPart));
    fill_each(parts, seed);
    return parts;
  }
  // Of which nothing was copied back: so it has one handle.
  std::vector<CUdeviceptr> make_behind_one_handle(const std::string& tag, uint64_t seed) {
    const auto parts = make_large(tag, seed);
    pause({tag}, BackupKind::kNone);
    resume({tag});
    fill_each(parts, seed);
    return parts;
  }
  static void fill_each(const std::vector<CUdeviceptr>& parts, uint64_t seed) {
    for (uint64_t index = 0; index < parts.size(); ++index) fill(parts[index], kChunk, seed + index);
  }
  void expect_content(const std::vector<CUdeviceptr>& parts, uint64_t seed) {
    for (uint64_t index = 0; index < parts.size(); ++index) {
      EXPECT_TRUE(holds(parts[index], kChunk, seed + index));
      EXPECT_TRUE(is_zero(parts[index] + kChunk, kChunk));
      EXPECT_TRUE(is_zero(parts[index] + kPart - kChunk, kChunk));
    }
  }
};

TEST_F(SharedSwapTest, Invariant2_HandlesOfSharedMemoryChangeHands) {
  static_assert(policy::kSharedInSwapBytes == 4 * kPart);
  const auto a = make_large("a", 10);
  pause({"a"});
  const auto b = make_behind_one_handle("b", 20);
  EXPECT_EQ(handles(), 1u) << "which no one who returns can use";
  core().budgets.device.set_limit(kTagBytes);  // no margin
  swap({"b"}, {"a"});
  EXPECT_EQ(handles(), 2u) << "at most 128 MiB each";
  for (int round = 0; round < 2; ++round) {
    expect_content(a, 10);
    swap({"a"}, {"b"});
    expect_content(b, 20);
    sim().clear_log();
    swap({"b"}, {"a"});
    EXPECT_EQ(sim().calls("cuMemCreate"), 0u) << "the handles themselves";
    EXPECT_EQ(handles(), 2u);
    expect_device_bytes(kTagBytes);
  }
  expect_content(a, 10);
  pause({"a"});
  resume({"a"});
  EXPECT_EQ(handles(), 2u) << "a tag that was swapped once may be again";
  sim().clear_log();
  const auto reports = swap({"a"}, {"b"});
  EXPECT_EQ(reports.front().totals().bytes, kTagBytes);
  EXPECT_EQ(reports.back().totals().bytes, kTagBytes);
  EXPECT_EQ(sim().calls("cuMemCreate"), 0u);
  EXPECT_EQ(handles(), 2u);
  expect_content(b, 20);
  core().budgets.device.set_limit(kUnlimited);
  resume({"a"});
  expect_content(a, 10);
  expect_no_leak();
}

TEST_F(SharedSwapTest, WhatWasFreedOfALeavingTagIsWorthAsMuchAsTheRest) {
  const auto a = make_large("a", 10);
  pause({"a"});
  auto b = make_behind_one_handle("b", 20);
  for (int index = 0; index < 2; ++index) {
    deallocate(core(), b.back());
    b.pop_back();
  }
  core().budgets.device.set_limit(kTagBytes);
  const auto reports = swap({"b"}, {"a"});
  EXPECT_EQ(reports.front().totals().bytes, kTagBytes);
  expect_content(a, 10);
  expect_device_bytes(kTagBytes);
  swap({"a"}, {"b"});
  expect_content(b, 20);
  expect_device_bytes(4 * kPart);
}

}  // namespace
}  // namespace ebbtide::testing
