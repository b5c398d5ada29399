// Before a trim, allocations that share a handle with a trimmed one get handles of their own.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/error.h"
#include "driver/context.h"
#include "shared_fixture.h"

namespace ebbtide::testing {
namespace {

class SeparateTest : public SharedTest {
 protected:
  const Backing* backing_of(CUdeviceptr address) { return core().registry.find(address)->chunks.front().backing.get(); }
  bool stands_alone(CUdeviceptr address) {
    const auto allocation = core().registry.find(address);
    return std::all_of(allocation->chunks.begin(), allocation->chunks.end(),
                       [](const Chunk& chunk) { return chunk.backing.use_count() == 1; });
  }
  void expect_all_alone(const std::vector<CUdeviceptr>& addresses) {
    for (const CUdeviceptr address : addresses) EXPECT_TRUE(stands_alone(address));
  }
  // Two allocations share a handle, and three share another.
  void make_two_groups() {
    small_ = make("small", 2);
    large_ = make("large", 3);
    come_back();
    ASSERT_EQ(handles(), 2u);
  }
  Report separate_both() { return separate({small_[0], large_[0]}, {"small", "large"}); }
  Report trim_both() { return trim({small_[0], large_[0]}, {"small", "large"}); }
  void expect_only_small_is_separated() {
    EXPECT_EQ(handles(), 3u);
    expect_device_bytes(5 * kChunk);
    expect_all_alone(small_);
    for (const CUdeviceptr address : large_) EXPECT_EQ(backing_of(address), backing_of(large_[0]));
    expect_whole(small_);
    expect_whole(large_);
    EXPECT_FALSE(is_partial("small") || is_partial("large"));
  }

  std::vector<CUdeviceptr> small_;
  std::vector<CUdeviceptr> large_;
};

TEST_F(SeparateTest, Invariant1_EachChunkGetsMemoryOfItsOwnAtItsAddress) {
  const auto parts = make("w", 3);
  come_back();
  EXPECT_EQ(handles(), 1u);
  EXPECT_TRUE(is_any_shared({parts[1]}));
  core().engines.trim();
  const uint64_t host_bytes = core().budgets.host.held_bytes();
  const Report report = separate({parts[1]});
  EXPECT_EQ(report.totals().copied, 3 * kChunk);
  EXPECT_EQ(report.totals().bytes, 0u);
  EXPECT_EQ(handles(), 3u);
  EXPECT_EQ(Live::now().reservations, 1u);
  EXPECT_EQ(Live::now().streams, 0u);
  expect_device_bytes(3 * kChunk);
  EXPECT_EQ(core().budgets.host.held_bytes(), host_bytes);
  expect_all_alone(parts);
  expect_whole(parts);
  EXPECT_FALSE(is_any_shared(parts));
  EXPECT_FALSE(is_partial("w"));
  EXPECT_FALSE(open_lease(core(), "w", "a test").is_away);
}

TEST_F(SeparateTest, ATrimThenTakesTheNamedMemoryAlone) {
  const auto parts = make("w", 3);
  come_back();
  separate({parts[1]});
  EXPECT_EQ(trim({parts[1]}).totals().bytes, kChunk);
  expect_device_bytes(2 * kChunk);
  EXPECT_TRUE(core().registry.find(parts[1])->is_trimmed);
  expect_whole({parts[0], parts[2]});
  come_back();
  EXPECT_EQ(handles(), 2u) << "there is a gap";
  expect_whole({parts[0], parts[2]});
  EXPECT_EQ(run_at(OperationKind::kResume, {"w"}, {parts[1]}).totals().bytes, kChunk);
  EXPECT_TRUE(is_zero(parts[1], kChunk));
  write(parts[1], kChunk);
  come_back();
  EXPECT_EQ(handles(), 1u);
  expect_whole(parts);
  free_all(parts);
  expect_no_leak();
}

TEST_F(SeparateTest, WhatWasSeparatedSharesAgainOnceItHasBeenAway) {
  const auto parts = make("w", 4);
  come_back();
  for (int round = 0; round < 2; ++round) {
    separate({parts[3]});
    EXPECT_EQ(handles(), 4u);
    for (const CUdeviceptr address : parts) write(address, kChunk);
    EXPECT_EQ(pause().totals().bytes, 4 * kChunk);
    expect_device_bytes(0);
    resume();
    EXPECT_EQ(handles(), 1u);
    expect_whole(parts);
  }
  expect_no_leak();
}

TEST_F(SeparateTest, EachIsFreedByItselfAfterwards) {
  const auto parts = make("w", 3);
  come_back();
  separate({parts[0]});
  for (size_t index = 0; index < parts.size(); ++index) {
    deallocate(core(), parts[index]);
    expect_device_bytes((2 - index) * kChunk);
  }
  EXPECT_EQ(Live::now().reservations, 0u);
  expect_no_leak();
}

TEST_F(SeparateTest, OthersKeepTheHandlesThatTheyShare) {
  core().rules.shared_handle_bytes = 2 * kChunk;
  const auto parts = make("w", 4);
  const auto elsewhere = make("w", 2, {BackupKind::kRam}, 1);
  const auto other = make("other", 2);
  come_back();
  EXPECT_EQ(handles(), 4u);
  sim().clear_log();
  separate({parts[2]});
  EXPECT_EQ(sim().calls("cuMemCreate"), 2u);
  EXPECT_EQ(handles(), 5u);
  expect_all_alone({parts[2], parts[3]});
  for (const auto& sharing : {std::vector{parts[0], parts[1]}, elsewhere, other}) {
    EXPECT_EQ(backing_of(sharing[0]), backing_of(sharing[1]));
    EXPECT_TRUE(is_any_shared({sharing[0]}));
    expect_whole(sharing);
  }
  expect_whole(parts);
  expect_device_bytes(6 * kChunk);
  expect_device_bytes(2 * kChunk, 1);
}

TEST_F(SeparateTest, HandlesOfSeveralDevicesAndTagsAtOnce) {
  const auto parts = make("w", 2);
  const auto elsewhere = make("w", 3, {BackupKind::kRam}, 1);
  const auto other = make("other", 2);
  come_back();
  separate({parts[0], elsewhere[2], other[1]}, {});
  EXPECT_EQ(handles(), 7u);
  for (const auto& all : {parts, elsewhere, other}) {
    expect_all_alone(all);
    expect_whole(all);
  }
  expect_device_bytes(4 * kChunk);
  expect_device_bytes(3 * kChunk, 1);
}

// One allocation shares a handle among its own chunks and with a neighbour.
TEST_F(SeparateTest, AnAllocationOfSeveralChunks) {
  const CUdeviceptr address = alloc_chunks("w", {BackupKind::kRam}, 0, {kChunk, 2 * kChunk});
  write(address, 3 * kChunk);
  const auto parts = make("w", 1);
  come_back();
  EXPECT_EQ(handles(), 1u);
  EXPECT_FALSE(is_any_shared({address, parts[0]}));
  EXPECT_TRUE(is_any_shared({address}));
  separate({address});
  EXPECT_EQ(handles(), 3u);
  expect_device_bytes(4 * kChunk);
  EXPECT_TRUE(is_whole(address));
  expect_whole(parts);
  EXPECT_EQ(trim({address}).totals().bytes, 3 * kChunk);
  expect_whole(parts);
}

TEST_F(SeparateTest, WhereNothingSharesOrAllAreNamedNothingIsDone) {
  const auto parts = make("w", 3);
  const auto check_untouched = [&](const std::vector<CUdeviceptr>& addresses) {
    EXPECT_FALSE(is_any_shared(addresses));
    const Live before = Live::now();
    sim().clear_log();
    EXPECT_EQ(separate(addresses).totals().copied, 0u);
    EXPECT_EQ(sim().calls("cuCtxSynchronize") + sim().calls("cuMemCreate") + sim().calls("cuMemUnmap"), 0u);
    EXPECT_EQ(Live::now(), before);
    expect_whole(parts);
  };
  for (const CUdeviceptr address : parts) check_untouched({address});
  check_untouched(parts);
  come_back();
  check_untouched(parts);
  EXPECT_FALSE(is_any_shared({parts[0] + kChunk / 2})) << "no allocation begins there";
}

// The smaller group comes first.
TEST_F(SeparateTest, Invariant2_WhatFindsNoRoomGoesOnSharing) {
  make_two_groups();
  for (const uint64_t room_chunks : {0, 1}) {
    core().budgets.device.set_limit((5 + room_chunks) * kChunk);
    const Live before = Live::now();
    EXPECT_EQ(separate_both().totals().copied, 0u);
    EXPECT_EQ(Live::now(), before);
    expect_whole(small_);
    expect_whole(large_);
  }
  core().budgets.device.set_limit(7 * kChunk);
  EXPECT_EQ(separate_both().totals().copied, 2 * kChunk);
  expect_only_small_is_separated();
  EXPECT_TRUE(is_any_shared({small_[0], large_[0]}));
  EXPECT_EQ(trim_both().totals().bytes, kChunk);
  expect_device_bytes(4 * kChunk);
  expect_whole({small_[1]});
  expect_whole(large_);
  // The chunk that was freed makes room for the rest.
  EXPECT_EQ(separate_both().totals().copied, 3 * kChunk);
  EXPECT_EQ(trim_both().totals().bytes, kChunk);
  expect_device_bytes(3 * kChunk);
  expect_whole({small_[1], large_[1], large_[2]});
}

TEST_F(SeparateTest, Invariant2_WhatTheDriverHasNoMemoryForGoesOnSharing) {
  for (uint64_t k = 1; k <= 5; ++k) {
    make_two_groups();
    sim().fail("cuMemCreate", k, CUDA_ERROR_OUT_OF_MEMORY, 0);
    EXPECT_NO_THROW(separate_both());
    sim().clear_failures();
    EXPECT_EQ(handles(), k <= 2 ? 2u : 3u);
    if (k > 2) expect_only_small_is_separated();
    expect_whole(small_);
    expect_whole(large_);
    sim().fail("cuMemCreate", 1, CUDA_ERROR_OUT_OF_MEMORY, 0);  // a trim separates what it needs
    EXPECT_EQ(trim_both().totals().bytes, k <= 2 ? 0 : kChunk);
    sim().clear_failures();
    free_all(small_);
    free_all(large_);
    expect_device_bytes(0);
  }
  expect_no_leak();
}

TEST_F(SeparateTest, Invariant2_NoMemoryToMapIsNoRoomEither) {
  for (const char* function : {"cuMemMap", "cuMemSetAccess"}) {
    make_two_groups();
    sim().fail(function, 1, CUDA_ERROR_OUT_OF_MEMORY, 0);
    EXPECT_EQ(trim_both().totals().bytes, 0u) << function;
    sim().clear_failures();
    EXPECT_EQ(handles(), 2u) << function;
    expect_whole(small_);
    expect_whole(large_);
    free_all(small_);
    free_all(large_);
  }
  expect_no_leak();
}

TEST_F(SeparateTest, OnlyTagsOfWhichSomethingIsPausedCountAPause) {
  make_two_groups();
  const auto paused = [&](const char* tag) { return core().registry.tag(tag).pause_count; };
  const uint64_t small_pauses = paused("small"), large_pauses = paused("large");
  Operation::claim(core(), OperationKind::kPause, {.tags = {.names = {"small", "large"}, .addresses = {small_[0]}}})
      ->commit();
  EXPECT_EQ(paused("small"), small_pauses + 1);
  EXPECT_EQ(paused("large"), large_pauses);
}

TEST_F(SeparateTest, Invariant2_NoMoreMemoryIsTakenThanTheLargestHandleNeeds) {
  make_two_groups();
  const auto more = make("more", 2);
  come_back();
  core().budgets.device.set_limit((7 + 3) * kChunk);
  EXPECT_EQ(separate({small_[0], large_[0], more[0]}, {}).totals().copied, 7 * kChunk);
  EXPECT_EQ(handles(), 7u);
  for (const auto& all : {small_, large_, more}) expect_whole(all);
  expect_device_bytes(7 * kChunk);
}

TEST_F(SeparateTest, WhatWasFreedOfASharedHandleGoes) {
  const auto parts = make("w", 4);
  come_back();
  free_all({parts[0], parts[2]});
  expect_device_bytes(4 * kChunk);
  EXPECT_TRUE(is_any_shared({parts[1]}));
  separate({parts[1]});
  expect_device_bytes(2 * kChunk);
  expect_whole({parts[1], parts[3]});
  const auto fresh = make("w", 2);
  EXPECT_EQ(fresh[0], parts[0]) << "its addresses are free";
  EXPECT_EQ(fresh[1], parts[2]);
  expect_whole({parts[1], parts[3], fresh[0], fresh[1]});
}

TEST_F(SeparateTest, Invariant5_AFreeThatWasPutOffKeepsTheOldMemoryUntilItIsDone) {
  const auto parts = make("w", 3);
  come_back();
  sim().fail("cuCtxSynchronize", 1, 999, 2);  // once for the free, and once when the claim tries the free again
  deallocate(core(), parts[1]);
  EXPECT_EQ(core().deferred_frees.count(), 1u);
  separate({parts[0]});
  sim().clear_failures();
  EXPECT_EQ(core().deferred_frees.count(), 1u);
  expect_device_bytes(5 * kChunk);
  expect_whole({parts[0], parts[2]});
  give_back_caches(core());
  expect_device_bytes(2 * kChunk);
  EXPECT_EQ(handles(), 2u);
  expect_whole({parts[0], parts[2]});
  expect_no_leak();
}

TEST_F(SeparateTest, AnOpenRegionIsAStateErrorBeforeAnythingMoves) {
  const auto parts = make("w", 2);
  come_back();
  const Live before = Live::now();
  const LeaseInfo lease = open_lease(core(), "w", "a test");
  sim().clear_log();
  EXPECT_THROW(separate({parts[0]}), StateError);
  EXPECT_EQ(sim().calls("cuCtxSynchronize") + sim().calls("cuMemCreate"), 0u);
  EXPECT_EQ(Live::now(), before);
  core().registry.leases.close(lease.id);
  separate({parts[0]});
  EXPECT_EQ(handles(), 2u);
  expect_whole(parts);
}

TEST_F(SeparateTest, Invariant9_ACaptureIsAStateErrorBeforeAnythingMoves) {
  const auto parts = make("w", 2);
  come_back();
  core().capture_gate.begin_capture();
  sim().clear_log();
  EXPECT_THROW(separate({parts[0]}), StateError);
  core().capture_gate.end_capture();
  const ContextScope scope(0);
  CUstream stream = nullptr;
  check(driver().cuStreamCreate(&stream, CU_STREAM_DEFAULT), "cuStreamCreate");
  const Live before = Live::now();
  check(driver().cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), "cuStreamBeginCapture");
  EXPECT_THROW(separate({parts[0]}), StateError);
  EXPECT_EQ(sim().calls("cuCtxSynchronize") + sim().calls("cuMemCreate"), 0u);
  EXPECT_EQ(Live::now(), before);
  CUgraph graph = nullptr;
  EXPECT_EQ(driver().cuStreamEndCapture(stream, &graph), CUDA_SUCCESS) << "it was not broken";
  separate({parts[0]});
  EXPECT_EQ(handles(), 2u);
  expect_whole(parts);
}

TEST_F(SeparateTest, ATrimThatIsAbandonedLeavesThemSharing) {
  const auto parts = make("w", 2);
  come_back();
  OperationRequest request;
  request.tags = {{"w"}, {parts[0]}, false};
  Operation::claim(core(), OperationKind::kSeparate, request)->abandon();
  EXPECT_EQ(handles(), 1u);
  EXPECT_TRUE(is_any_shared({parts[0]}));
  EXPECT_FALSE(is_partial("w"));
  expect_whole(parts);
}

}  // namespace
}  // namespace ebbtide::testing
