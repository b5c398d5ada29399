// Skipped blocks, backups that are kept, and the operations beside pause and resume: retained backups, every store,
// swap, prepare, trim, views.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "core/operation/backup_view.h"
#include "core_fixture.h"
#include "driver/device_kernels.h"

namespace ebbtide::testing {
namespace {

class MovesTest : public CoreTest {
 protected:
  CUdeviceptr alloc_retained(const std::string& tag, uint64_t size_bytes, BackupKind kind = BackupKind::kRam) {
    return allocate(core(), core().registry.tag(tag), Policy{kind, true}, 0, size_bytes);
  }
  std::vector<Report> swap(const std::vector<std::string>& leaving, const std::vector<std::string>& returning) {
    OperationRequest request;
    request.tags.names = leaving;
    request.resume_tags.names = returning;
    return Operation::claim(core(), OperationKind::kSwap, std::move(request))->commit();
  }
  static unsigned char* bytes_at(CUdeviceptr address) { return reinterpret_cast<unsigned char*>(address); }
};

TEST_F(MovesTest, Invariant2_EveryStoreGivesTheBytesBackRetainedOrNot) {
  for (const BackupKind kind : {BackupKind::kRam, BackupKind::kPinned, BackupKind::kDisk}) {
    for (const bool retain : {false, true}) {
      const CUdeviceptr address = allocate(core(), core().registry.tag("w"), Policy{kind, retain}, 0, 6 * kChunk);
      for (uint64_t round = 1; round <= 4; ++round) {
        fill(address, 6 * kChunk, round);
        EXPECT_EQ(pause().totals().copied, 6 * kChunk);
        EXPECT_EQ(Live::now().device_bytes, 0u);
        EXPECT_EQ(resume().totals().copied, 6 * kChunk);
        EXPECT_TRUE(holds(address, 6 * kChunk, round));
      }
      deallocate(core(), address);
      EXPECT_EQ(core().budgets.host.held_bytes(), core().engines.held_bytes());
      EXPECT_EQ(core().budgets.pinned.held_bytes(), core().engines.held_bytes());
    }
  }
  expect_no_leak();
}

TEST_F(MovesTest, Invariant2_WhatDidNotChangeSinceItWasStoredIsNotCopiedAndComesBack) {
  const CUdeviceptr address = alloc_retained("w", 8 * kChunk);
  fill(address, 8 * kChunk, 1);
  EXPECT_EQ(pause().totals().clean, 0u);
  resume();
  ReportRow row = pause().totals();
  EXPECT_EQ(row.clean, 8 * kChunk);
  EXPECT_EQ(row.copied, 0u);
  resume();
  EXPECT_TRUE(holds(address, 8 * kChunk, 1));
  bytes_at(address)[3 * kChunk - 1] ^= 1;  // one bit at the end of a block
  row = pause().totals();
  EXPECT_EQ(row.copied, kChunk);
  EXPECT_EQ(row.clean, 7 * kChunk);
  resume();
  bytes_at(address)[3 * kChunk - 1] ^= 1;
  EXPECT_TRUE(holds(address, 8 * kChunk, 1));
  core().rules.skip.clean = false;
  EXPECT_EQ(pause().totals().copied, 8 * kChunk);
  resume();
  EXPECT_TRUE(holds(address, 8 * kChunk, 1));
}

TEST_F(MovesTest, Invariant2_BlocksOfOneValueComeBackAsThatValue) {
  const CUdeviceptr address = alloc("w", 3 * kChunk);
  std::memset(bytes_at(address), 0xff, kChunk);  // NaN in every float format
  std::memset(bytes_at(address) + kChunk, 7, kChunk);
  bytes_at(address)[2 * kChunk - 1] = 8;  // all equal but the last byte
  ReportRow row = pause().totals();
  EXPECT_EQ(row.constant, 2 * kChunk);
  EXPECT_EQ(row.copied, kChunk);
  resume();
  EXPECT_EQ(bytes_at(address)[0], 0xff);
  EXPECT_EQ(std::memcmp(bytes_at(address), bytes_at(address) + 1, kChunk - 1), 0);
  EXPECT_EQ(bytes_at(address)[kChunk], 7);
  EXPECT_EQ(bytes_at(address)[2 * kChunk - 1], 8);
  EXPECT_TRUE(is_zero(address + 2 * kChunk, kChunk));
  core().rules.skip.constant = false;
  EXPECT_EQ(pause().totals().copied, 3 * kChunk);
  resume();
}

TEST_F(MovesTest, UnusedRangesAreLeftAndAnOldWordOfThemIsNotBelieved) {
  const CUdeviceptr address = alloc("w", 4 * kChunk);
  fill(address, 4 * kChunk, 1);
  OperationRequest request;
  request.unused = AddressRanges({{address + kChunk - 8, 2 * kChunk + 8}});
  request.unused_as_of = core().registry.leases.newest();
  EXPECT_EQ(Operation::claim(core(), OperationKind::kPause, request)->commit().front().totals().unused, 2 * kChunk);
  resume();
  EXPECT_TRUE(holds(address, kChunk, 1));
  EXPECT_TRUE(is_zero(address + kChunk, 2 * kChunk));
  fill(address, 4 * kChunk, 2);
  core().registry.leases.close(open_lease(core(), "w", "somebody").id);
  EXPECT_EQ(Operation::claim(core(), OperationKind::kPause, request)->commit().front().totals().unused, 0u);
  resume();
  EXPECT_TRUE(holds(address, 4 * kChunk, 2));
}

TEST_F(MovesTest, WithoutKernelsEverythingIsCopied) {
  DeviceKernels::forget_all();
  sim().fail("cuModuleLoadData", 1, 2, 0);
  alloc_retained("w", 2 * kChunk);
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(pause().totals().copied, 2 * kChunk);
    resume();
  }
  sim().clear_failures();
}

TEST_F(MovesTest, ASwapOfAnySizesFitsTheLargerAndAMargin) {
  for (const uint64_t returning_chunks : {1, 4, 9}) {
    const CUdeviceptr out = alloc_chunks("out", BackupKind::kRam, 0, {kChunk, 2 * kChunk, kChunk});
    const CUdeviceptr in = alloc_chunks("in", BackupKind::kRam, 0, std::vector<uint64_t>(returning_chunks, kChunk));
    const CUdeviceptr blank = alloc("in", kChunk, BackupKind::kNone);
    fill(out, 4 * kChunk, 1);
    fill(in, returning_chunks * kChunk, 2);
    fill(blank, kChunk, 3);
    pause({"in"});
    const auto reports = swap({"out"}, {"in"});
    EXPECT_EQ(reports.front().totals().bytes, 4 * kChunk);
    EXPECT_EQ(reports.back().totals().bytes, (returning_chunks + 1) * kChunk);
    EXPECT_TRUE(holds(in, returning_chunks * kChunk, 2));
    EXPECT_TRUE(is_zero(blank, kChunk)) << "memory that changed hands shows no old bytes";
    swap({"in"}, {"out"});
    EXPECT_TRUE(holds(out, 4 * kChunk, 1));
    resume();
    EXPECT_TRUE(holds(in, returning_chunks * kChunk, 2));
    for (const CUdeviceptr address : {out, in, blank}) deallocate(core(), address);
  }
  expect_no_leak();
}

TEST_F(MovesTest, Invariant2_ZerosInMemoryThatChangesHandsAreClearedRunByRun) {
  constexpr uint64_t kBlocks = 8;
  const CUdeviceptr in = alloc_chunks("in", BackupKind::kRam, 0, {kBlocks * kChunk});
  fill(in + 2 * kChunk, kChunk, 1);
  std::memset(bytes_at(in + 3 * kChunk), 7, kChunk);
  fill(in + 5 * kChunk, kChunk, 2);
  pause({"in"});
  const CUdeviceptr out = alloc_chunks("out", BackupKind::kRam, 0, {kBlocks * kChunk});
  fill(out, kBlocks * kChunk, 3);
  core().budgets.device.set_limit(kBlocks * kChunk);  // no margin: the one handle is handed over
  const uint64_t calls = sim().calls("cuMemsetD8Async");
  swap({"out"}, {"in"});
  EXPECT_EQ(sim().calls("cuMemsetD8Async") - calls, 3u) << "blocks 0 and 1, block 4, blocks 6 and 7";
  for (const uint64_t block : {0, 1, 4, 6, 7}) EXPECT_TRUE(is_zero(in + block * kChunk, kChunk)) << block;
  EXPECT_TRUE(holds(in + 2 * kChunk, kChunk, 1));
  EXPECT_EQ(std::count(bytes_at(in + 3 * kChunk), bytes_at(in + 4 * kChunk), 7), static_cast<std::ptrdiff_t>(kChunk));
  EXPECT_TRUE(holds(in + 5 * kChunk, kChunk, 2));
}

TEST_F(MovesTest, Invariant3_ASwapThatDoesNotFitLeavesBothAsTheyWere) {
  const CUdeviceptr in = alloc("in", 8 * kChunk);
  fill(in, 8 * kChunk, 2);
  pause({"in"});
  const CUdeviceptr out = alloc("out", 2 * kChunk);
  fill(out, 2 * kChunk, 1);
  core().budgets.device.set_limit(7 * kChunk);
  EXPECT_THROW(swap({"out"}, {"in"}), OutOfMemory);
  EXPECT_TRUE(holds(out, 2 * kChunk, 1));
  core().budgets.device.set_limit(8 * kChunk);
  swap({"out"}, {"in"});
  EXPECT_TRUE(holds(in, 8 * kChunk, 2));
  EXPECT_THROW(swap({"in"}, {"in"}), InvalidArgument);
  EXPECT_THROW(swap({}, {"in"}), InvalidArgument);
}

TEST_F(MovesTest, PreparedMemoryIsClaimedOnceAndNotAgain) {
  const CUdeviceptr address = alloc("w", 4 * kChunk);
  fill(address, 4 * kChunk, 1);
  EXPECT_EQ(claim(OperationKind::kPrepare)->commit().front().totals().bytes, 4 * kChunk);
  const uint64_t held = core().budgets.host.held_bytes() - core().engines.held_bytes();
  EXPECT_EQ(held, 4 * kChunk);
  EXPECT_GT(core().engines.held_bytes(), 0u) << "the ring is made as well";
  core().budgets.host.set_limit(core().budgets.host.held_bytes() + 128 * kKiB);
  EXPECT_EQ(pause().totals().copied, 4 * kChunk);
  resume();
  EXPECT_TRUE(holds(address, 4 * kChunk, 1));
  EXPECT_EQ(core().budgets.host.held_bytes(), core().engines.held_bytes());
}

TEST_F(MovesTest, TrimmedMemoryGoesWithoutAPauseAndComesBackWhenItIsNamed) {
  const CUdeviceptr kept = alloc("w", kChunk);
  const CUdeviceptr idle = alloc("w", 2 * kChunk);
  fill(kept, kChunk, 1);
  OperationRequest request;
  request.tags.names = {"w"};
  request.tags.addresses = {idle};
  EXPECT_EQ(Operation::claim(core(), OperationKind::kTrim, request)->commit().front().totals().bytes, 2 * kChunk);
  const LeaseInfo lease = open_lease(core(), "w", "somebody");
  EXPECT_FALSE(lease.is_away);
  request.tags.addresses = {idle, kept};
  EXPECT_THROW(Operation::claim(core(), OperationKind::kTrim, request), StateError);
  request.tags.addresses = {idle};
  core().registry.leases.close(lease.id);
  EXPECT_EQ(pause().totals().bytes, kChunk);
  EXPECT_EQ(resume().totals().bytes, kChunk);
  EXPECT_EQ(Operation::claim(core(), OperationKind::kResume, request)->commit().front().totals().bytes, 2 * kChunk);
  EXPECT_TRUE(is_zero(idle, 2 * kChunk));
  EXPECT_TRUE(holds(kept, kChunk, 1));
}

TEST_F(MovesTest, Invariant9_APinnedBackupIsUnpinnedAfterTheCaptureInWhichItsMemoryWasFreed) {
  const CUdeviceptr pinned = alloc("w", kChunk, BackupKind::kPinned);
  const CUdeviceptr other = alloc("w", kChunk);
  fill(pinned, kChunk, 1);
  fill(other, kChunk, 2);
  pause();
  core().capture_gate.begin_capture();
  const uint64_t calls = sim().calls("cuMemHostUnregister");
  deallocate(core(), pinned);
  deallocate(core(), other);
  EXPECT_EQ(sim().calls("cuMemHostUnregister"), calls);
  EXPECT_EQ(core().deferred_frees.count(), 1u) << "unpinned memory goes at once";
  core().capture_gate.end_capture();
  give_back_caches(core());
  EXPECT_EQ(core().deferred_frees.count(), 0u);
  core().engines.trim();
  EXPECT_EQ(Live::now().registered_ranges, 0u);
}

TEST_F(MovesTest, ViewsShowOneValueBlocksAndWritesComeBack) {
  const CUdeviceptr address = alloc_retained("w", 2 * kChunk);
  fill(address, kChunk, 1);
  pause();
  {
    const auto view = view_backup(core(), {address, 2 * kChunk});
    ASSERT_TRUE(view);
    EXPECT_TRUE(holds(reinterpret_cast<CUdeviceptr>(view->bytes()), kChunk, 1));
    EXPECT_TRUE(is_zero(reinterpret_cast<CUdeviceptr>(view->bytes()) + kChunk, kChunk));
    fill(reinterpret_cast<CUdeviceptr>(view->bytes()), 2 * kChunk, 5);
    resume();
    EXPECT_TRUE(holds(address, 2 * kChunk, 5));
    fill(address, 2 * kChunk, 6);
    pause();
    EXPECT_TRUE(holds(reinterpret_cast<CUdeviceptr>(view->bytes()), 2 * kChunk, 5)) << "no pause writes under a view";
    resume();
  }
  EXPECT_TRUE(holds(address, 2 * kChunk, 6));
  EXPECT_FALSE(view_backup(core(), {address, 8}));
  EXPECT_THROW(view_backup(core(), {address, 3 * kChunk}), InvalidArgument);
}

}  // namespace
}  // namespace ebbtide::testing
