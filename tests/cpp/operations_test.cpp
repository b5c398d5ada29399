// Pause and resume without failures: they wait for queued work, their reports add up, and chunks of real sizes leave
// and come back.
#include <gtest/gtest.h>

#include <cstring>

#include "core_fixture.h"
#include "driver/context.h"
#include "driver/stream.h"
#include "policy/copy_plan.h"

namespace ebbtide::testing {
namespace {

class OperationsTest : public CoreTest {
 protected:
  OperationsTest() { check(driver().cuCtxSetCurrent(primary_context(0)), "cuCtxSetCurrent"); }
  // Work that the simulated device does at the last moment, when a thread waits for it.
  void queue_memset(const Stream& stream, CUdeviceptr address, size_t size_bytes, unsigned char value) {
    check(driver().cuMemsetD8Async(address, value, size_bytes, stream.get()), "cuMemsetD8Async");
  }
  static bool is_all(CUdeviceptr address, size_t size_bytes, unsigned char value) {
    const std::vector<unsigned char> wanted(size_bytes, value);
    return std::memcmp(reinterpret_cast<const void*>(address), wanted.data(), size_bytes) == 0;
  }
};

TEST_F(OperationsTest, Invariant5_PauseWaitsForQueuedWorkOnEveryStream) {
  const CUdeviceptr kept = alloc("w", 2 * kChunk);
  const CUdeviceptr dropped = alloc("kv", kChunk, BackupKind::kNone);
  {
    const Stream first = Stream::create();
    const Stream second = Stream::create();
    queue_memset(first, kept, kChunk, 7);
    queue_memset(second, kept + kChunk, kChunk, 8);
    queue_memset(second, dropped, kChunk, 9);
    ASSERT_EQ(Live::now().queued_items, 3u);
    pause();
    EXPECT_EQ(Live::now().queued_items, 0u);
    resume();
    check(driver().cuCtxSynchronize(), "cuCtxSynchronize");  // fails if the device accessed memory that was not mapped
  }
  EXPECT_TRUE(is_all(kept, kChunk, 7));
  EXPECT_TRUE(is_all(kept + kChunk, kChunk, 8));
  EXPECT_TRUE(is_zero(dropped, kChunk));
}

TEST_F(OperationsTest, Invariant5_FreeWaitsForQueuedWork) {
  const CUdeviceptr address = alloc("w", kChunk);
  const Stream stream = Stream::create();
  queue_memset(stream, address, kChunk, 7);
  deallocate(core(), address);
  EXPECT_EQ(Live::now().mappings, 0u);
  EXPECT_EQ(driver().cuCtxSynchronize(), CUDA_SUCCESS);
}

TEST_F(OperationsTest, WorkQueuedAfterAResumeSeesTheBytes) {
  const CUdeviceptr address = alloc("w", kChunk);
  fill(address, kChunk, 1);
  pause();
  resume();
  const Stream stream = Stream::create();
  std::vector<uint64_t> host(kChunk / sizeof(uint64_t));
  check(driver().cuMemcpyDtoHAsync(host.data(), address, kChunk, stream.get()), "cuMemcpyDtoHAsync");
  stream.synchronize();
  EXPECT_TRUE(holds(reinterpret_cast<CUdeviceptr>(host.data()), kChunk, 1));
}

TEST_F(OperationsTest, Invariant1And2_RealChunksMakeTheWayAndBack) {
  ::setenv("EBBTIDE_COPY_THREADS", "2", 1);
  const uint64_t size = 128 * kMiB + kChunk;
  const CUdeviceptr address = alloc("w", size);
  ASSERT_EQ(core().registry.find(address)->chunks.size(), 2u);
  for (const uint64_t offset : {uint64_t{0}, 64 * kMiB, 128 * kMiB - kChunk, 128 * kMiB})
    fill(address + offset, kChunk, offset + 1);
  for (int round = 0; round < 2; ++round) {
    const ReportRow out = pause().totals();
    EXPECT_EQ(out.copied, 4 * kChunk);
    EXPECT_EQ(out.constant, size - 4 * kChunk);
    EXPECT_EQ(Live::now().device_bytes, 0u);
    EXPECT_EQ(resume().totals().copied, 4 * kChunk);
    for (const uint64_t offset : {uint64_t{0}, 64 * kMiB, 128 * kMiB - kChunk, 128 * kMiB}) {
      EXPECT_TRUE(holds(address + offset, kChunk, offset + 1));
    }
    EXPECT_TRUE(is_zero(address + kChunk, kChunk));
  }
}

// Pieces of a sixteenth of the allocation, which threads share. The last chunk is one piece.
TEST_F(OperationsTest, Invariant2_PiecesThatThreadsShareAreBitForBit) {
  ::setenv("EBBTIDE_COPY_THREADS", "2", 1);
  const uint64_t pieces = 16;
  const uint64_t size = pieces * 2 * policy::kPartBytes;
  const CUdeviceptr address = allocate(core(), core().registry.tag("w"), {BackupKind::kRam, true}, 0, size + kChunk);
  for (uint64_t round = 1; round <= 3; ++round) {
    fill(address, size + kChunk, round);
    sim().clear_log();
    EXPECT_EQ(pause().totals().copied, size + kChunk);
    core().registry.find(address)->stored->may_be_pinned = false;
    EXPECT_EQ(sim().calls("cuMemcpyDtoHAsync"), pieces + 1);
    EXPECT_EQ(resume().totals().copied, size + kChunk);
    EXPECT_EQ(sim().calls("cuMemcpyHtoDAsync"), pieces + 1);
    EXPECT_TRUE(holds(address, size + kChunk, round));
  }
  EXPECT_EQ(Live::now().registered_ranges, 1u) << "one ring for all of them";
}

// A call that fails in the middle of a real allocation: one chunk is away, one is here.
TEST_F(OperationsTest, Invariant3_ARealAllocationInTwoPlacesIsMixedAndComesBack) {
  const uint64_t size = 128 * kMiB + kChunk;
  const CUdeviceptr address = alloc("w", size);
  fill(address, kChunk, 1);
  fill(address + 128 * kMiB, kChunk, 2);
  for (const char* call : {"cuMemUnmap", "cuMemRelease"}) {
    sim().fail(call, 2, 999, 1);
    EXPECT_THROW(pause(), DriverError);
    sim().clear_failures();
    EXPECT_TRUE(is_partial("w"));
    EXPECT_TRUE(core().registry.is_away(address, 1));
    resume();
    EXPECT_TRUE(holds(address, kChunk, 1));
    EXPECT_TRUE(holds(address + 128 * kMiB, kChunk, 2));
    EXPECT_FALSE(is_partial("w"));
  }
}

TEST_F(OperationsTest, Invariant2_AnotherTagsBytesAreNeverSeen) {
  const CUdeviceptr first = alloc("a", kChunk);
  const CUdeviceptr second = alloc("b", kChunk, BackupKind::kNone);
  fill(first, kChunk, 1);
  fill(second, kChunk, 2);
  pause();
  resume({"b"});
  EXPECT_TRUE(is_zero(second, kChunk));
  const CUdeviceptr fresh = alloc("c", kChunk);
  EXPECT_TRUE(is_zero(fresh, kChunk));
  resume({"a"});
  EXPECT_TRUE(holds(first, kChunk, 1));
}

TEST_F(OperationsTest, WhatWasMadeWhileTheTagIsAwayIsResidentAndSkippedByResume) {
  const CUdeviceptr away = alloc("w", kChunk);
  fill(away, kChunk, 1);
  pause();
  const CUdeviceptr fresh = alloc("w", kChunk);
  fill(fresh, kChunk, 2);
  EXPECT_EQ(resume().totals().bytes, kChunk);
  EXPECT_TRUE(holds(away, kChunk, 1));
  EXPECT_TRUE(holds(fresh, kChunk, 2));
  EXPECT_EQ(pause().totals().bytes, 2 * kChunk);
}

TEST_F(OperationsTest, ReportsAddUpByTagAndDevice) {
  fill(alloc("a", kChunk), kChunk, 1);
  alloc("a", 2 * kChunk, BackupKind::kNone, 1);
  fill(alloc("b", kChunk, BackupKind::kRam, 1), kChunk, 1);
  alloc("stays", kChunk, BackupKind::kRam, 1);
  const Report report = pause({"a", "b"});
  EXPECT_EQ(report.rows.size(), 3u);
  EXPECT_EQ(report.rows.at({"a", 0}).copied, kChunk);
  EXPECT_EQ(report.rows.at({"a", 1}).bytes, 2 * kChunk);
  EXPECT_EQ(report.rows.at({"a", 1}).copied, 0u);
  EXPECT_EQ(report.totals().bytes, 4 * kChunk);
  EXPECT_EQ(report.totals().copied, 2 * kChunk);
  EXPECT_EQ(report.remaining().size(), 1u);
  EXPECT_EQ(report.remaining().at({"stays", 1}).bytes, kChunk);
  EXPECT_GT(report.seconds, 0);
  const Report back = resume();
  EXPECT_EQ(back.totals().bytes, 4 * kChunk);
  EXPECT_EQ(back.remaining().at({"a", 1}).bytes, 2 * kChunk);
}

TEST_F(OperationsTest, BackupOnceAgainstThePolicy) {
  const CUdeviceptr kept = alloc("w", kChunk);
  const CUdeviceptr dropped = alloc("kv", kChunk, BackupKind::kNone);
  fill(kept, kChunk, 1);
  fill(dropped, kChunk, 2);
  pause({}, BackupKind::kRam);
  resume();
  EXPECT_TRUE(holds(dropped, kChunk, 2));
  pause({}, BackupKind::kNone);
  EXPECT_EQ(core().budgets.host.held_bytes(), core().engines.held_bytes());
  resume();
  EXPECT_TRUE(is_zero(kept, kChunk));
}

TEST_F(OperationsTest, ABackupForEachTagInOnePause) {
  const CUdeviceptr weights = alloc("w", kChunk, BackupKind::kNone);
  const CUdeviceptr cache = alloc("kv", kChunk);
  const CUdeviceptr other = alloc("other", kChunk);
  const CUdeviceptr as_allocated = alloc("plain", kChunk);
  fill(weights, kChunk, 1);
  fill(cache, kChunk, 2);
  fill(other, kChunk, 3);
  fill(as_allocated, kChunk, 4);
  OperationRequest request;
  request.backup = BackupKind::kPinned;  // for those that backup_by_tag leaves out
  request.backup_by_tag = {{"w", BackupKind::kRam}, {"kv", BackupKind::kNone}, {"other", BackupKind::kDisk}};
  const Report report = Operation::claim(core(), OperationKind::kPause, request)->commit().front();
  EXPECT_EQ(report.totals().bytes, 4 * kChunk);
  EXPECT_EQ(report.totals().copied, 3 * kChunk);
  const auto kind_of = [&](CUdeviceptr address) { return core().registry.find(address)->stored->kind; };
  EXPECT_EQ(kind_of(weights), BackupKind::kRam);
  EXPECT_EQ(place_of(cache), Place::kDropped);
  EXPECT_EQ(kind_of(other), BackupKind::kDisk);
  EXPECT_EQ(kind_of(as_allocated), BackupKind::kPinned);
  resume();
  EXPECT_TRUE(holds(weights, kChunk, 1));
  EXPECT_TRUE(is_zero(cache, kChunk));
  EXPECT_TRUE(holds(other, kChunk, 3));
  EXPECT_TRUE(holds(as_allocated, kChunk, 4));
}

TEST_F(OperationsTest, Invariant3_WhereOneTagIsRefusedItsBackupNoTagOfThePauseLeaves) {
  const CUdeviceptr cache = alloc("kv", kChunk, BackupKind::kNone);
  const CUdeviceptr weights = alloc("w", kChunk, BackupKind::kNone);
  fill(cache, kChunk, 1);
  fill(weights, kChunk, 2);
  core().budgets.host.set_limit(core().budgets.host.held_bytes());
  OperationRequest request;
  request.backup_by_tag = {{"w", BackupKind::kRam}, {"kv", BackupKind::kNone}};
  EXPECT_THROW(Operation::claim(core(), OperationKind::kPause, request), StoreError);
  EXPECT_TRUE(holds(cache, kChunk, 1));
  EXPECT_TRUE(holds(weights, kChunk, 2));
  core().budgets.host.set_limit(kUnlimited);
}

TEST_F(OperationsTest, ResumeOfSomeAddressesBringsOnlyThese) {
  const CUdeviceptr first = alloc("w", kChunk);
  const CUdeviceptr second = alloc("w", kChunk);
  fill(first, kChunk, 1);
  fill(second, kChunk, 2);
  pause();
  const OperationRequest request = {.tags = {.names = {"w"}, .addresses = {second}, .is_missing_ok = false},
                                    .backup = {}};
  EXPECT_EQ(Operation::claim(core(), OperationKind::kResume, request)->commit().front().totals().bytes, kChunk);
  EXPECT_TRUE(holds(second, kChunk, 2));
  EXPECT_TRUE(core().registry.is_away(first, 1));
  EXPECT_FALSE(is_partial("w"));
  resume();
  EXPECT_TRUE(holds(first, kChunk, 1));
}

// The driver has too little memory until the deferred frees are done.
TEST_F(OperationsTest, Invariant7_AResumeThatIsTriedAgainIsChargedOnce) {
  const CUdeviceptr first = alloc("w", kChunk);
  const CUdeviceptr second = alloc("w", kChunk);
  fill(first, kChunk, 1);
  fill(second, kChunk, 2);
  pause({"w"});
  const CUdeviceptr other = alloc("other", kChunk);
  {
    const DeferredFrees::Hold hold(core().deferred_frees, 0);
    deallocate(core(), other);
    ASSERT_EQ(core().deferred_frees.count(), 1u);
    core().budgets.device.set_limit(3 * kChunk);
    sim().fail("cuMemCreate", 1, CUDA_ERROR_OUT_OF_MEMORY, 1);
    EXPECT_EQ(resume({"w"}).totals().bytes, 2 * kChunk);
    sim().clear_failures();
  }
  EXPECT_EQ(core().deferred_frees.count(), 0u);
  EXPECT_EQ(core().budgets.device.held_bytes(0), 2 * kChunk);
  EXPECT_TRUE(holds(first, kChunk, 1));
  EXPECT_TRUE(holds(second, kChunk, 2));
  core().budgets.device.set_limit(kUnlimited);
  deallocate(core(), first);
  deallocate(core(), second);
  EXPECT_EQ(core().budgets.device.held_bytes(0), 0u);
}

TEST_F(OperationsTest, TheBookkeepingOfTwentyCyclesDoesNotGrow) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk});
  fill(address, 2 * kChunk, 1);
  pause();
  resume();
  const Live before = Live::now();
  const uint64_t host_bytes = core().budgets.host.held_bytes();
  for (int round = 0; round < 20; ++round) {
    pause();
    resume();
    ASSERT_EQ(Live::now(), before);
    ASSERT_EQ(core().budgets.host.held_bytes(), host_bytes);
  }
  EXPECT_TRUE(holds(address, 2 * kChunk, 1));
  deallocate(core(), address);
  expect_no_leak();
}

}  // namespace
}  // namespace ebbtide::testing
