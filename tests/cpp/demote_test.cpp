// Demotion: chunks of the device move to the host, where their address and content stay.
#include <thread>

#include "base/error.h"
#include "core/move/relocations.h"
#include "moves_faults.h"
#include "overflow_world.h"

namespace ebbtide::testing {
namespace {

class DemoteTest : public OverflowWorld {
 protected:
  uint64_t held_bytes(int device = 0) { return core().budgets.device.held_bytes(device); }
  bool shares(size_t item) { return is_any_shared({core().registry.find(items_[item].address)}); }
  void come_back() {
    pause();
    resume();
  }
  static std::string calls_in_order() {
    std::string text(sim().log(nullptr, 0) + 1, '\0');
    sim().log(text.data(), text.size());
    return text;
  }
};

TEST_F(DemoteTest, Invariant1_MovesEverythingToTheHostAndBack) {
  for (const Policy& policy : {kRam, kRetained, kNone, kPinned, kSplitRam}) {
    start();
    const size_t item = make("w", policy, {1, 2, 1});
    const size_t other = make("v", policy, {1});
    const Report report = demote({"w"});
    EXPECT_EQ(report.kind, OperationKind::kDemote);
    EXPECT_EQ(report.totals().bytes, 4 * kChunk);
    EXPECT_EQ(report.totals().copied, 4 * kChunk);
    EXPECT_EQ(host_bytes(item), 4 * kChunk);
    EXPECT_EQ(host_bytes(other), 0u);
    EXPECT_EQ(held_bytes(), kChunk);
    EXPECT_EQ(core().budgets.host.held_bytes(), 4 * kChunk);
    EXPECT_EQ(amounts("w").host_bytes, 4 * kChunk);
    EXPECT_EQ(amounts("w").device_bytes, 0u);
    EXPECT_EQ(core().counters.bytes_demoted, 4 * kChunk);
    EXPECT_FALSE(is_partial("w"));
    expect_resident("demoted");
    EXPECT_EQ(demote({"w"}).totals().bytes, 0u) << "it is there already";
    fill_item(item);  // it can be written to
    EXPECT_EQ(promote({"w"}).totals().bytes, 4 * kChunk);
    EXPECT_EQ(held_bytes(), 5 * kChunk);
    EXPECT_EQ(core().budgets.host.held_bytes(), 0u);
    expect_resident("promoted");
    free_all();
    expect_nothing_left();
  }
}

TEST_F(DemoteTest, GoesByAddressAndKeepsToTheBytesAllowed) {
  const size_t first = make("w", kRam, {2, 1});
  const size_t second = make("w", kRam, {3, 1});
  EXPECT_EQ(demote({}, kChunk - 1).totals().bytes, 0u);
  EXPECT_EQ(demote({}, 0).totals().bytes, 0u);
  EXPECT_EQ(demote({}, 4 * kChunk).totals().bytes, 4 * kChunk);
  EXPECT_EQ(host_bytes(first), 3 * kChunk);
  EXPECT_EQ(host_bytes(second), kChunk) << "the chunk of 3 is too large for what is left, the one behind it is not";
  expect_resident("demoted in part");
  EXPECT_EQ(demote({}, 2 * kChunk).totals().bytes, 0u);
  EXPECT_EQ(demote().totals().bytes, 3 * kChunk);
  expect_resident("demoted");
}

TEST_F(DemoteTest, APromotionKeepsToTheBytesAllowed) {
  const size_t first = make("w", kRam, {2, 1});
  const size_t second = make("w", kRam, {1});
  demote();
  EXPECT_EQ(promote({}, 2 * kChunk - 1).totals().bytes, 0u);
  EXPECT_EQ(promote({}, 3 * kChunk).totals().bytes, 3 * kChunk) << "the oldest first";
  EXPECT_EQ(host_bytes(first), 0u);
  EXPECT_EQ(host_bytes(second), kChunk);
  expect_resident("promoted in part");
  EXPECT_EQ(promote().totals().bytes, kChunk);
  expect_resident("promoted");
}

TEST_F(DemoteTest, WhatSharesAHandleGoesTogetherToHandlesOfItsOwn) {
  for (size_t index = 0; index < 3; ++index) make("w", kRam, {1, 1});
  come_back();
  ASSERT_TRUE(shares(0));
  EXPECT_EQ(demote({}, 5 * kChunk).totals().bytes, 0u) << "the handle has 6";
  EXPECT_EQ(demote({}, 6 * kChunk).totals().bytes, 6 * kChunk);
  for (size_t index = 0; index < 3; ++index) EXPECT_FALSE(shares(index));
  EXPECT_EQ(held_bytes(), 0u);
  expect_resident("demoted");
  promote();
  expect_resident("promoted");
  free_all();
  expect_nothing_left();
}

TEST_F(DemoteTest, WhatWasFreedOfASharedHandleGoesWithItsNeighbours) {
  for (size_t index = 0; index < 3; ++index) make("w", kRam, {1});
  come_back();
  deallocate(core(), items_.front().address);
  items_.erase(items_.begin());
  for (size_t index = 0; index < 2; ++index) fill_item(index);  // their seeds follow the index
  EXPECT_EQ(held_bytes(), 3 * kChunk);
  EXPECT_EQ(demote().totals().bytes, 3 * kChunk);
  EXPECT_EQ(held_bytes(), 0u);
  expect_resident("demoted");
}

TEST_F(DemoteTest, OfNamedAllocationsWhatOthersShareStays) {
  for (size_t index = 0; index < 3; ++index) make("w", kRam, {1});
  come_back();
  OperationRequest request;
  request.tags.names = {"w"};
  request.tags.addresses = {items_[0].address};
  EXPECT_EQ(Operation::claim(core(), OperationKind::kDemote, request)->commit().front().totals().bytes, kChunk);
  EXPECT_EQ(host_bytes(0), kChunk);
  EXPECT_EQ(spilled_bytes(), kChunk);
  expect_resident("demoted");
}

TEST_F(DemoteTest, Invariant7_WithoutHostRoomNothingMoves) {
  make("w", kRam, {1, 1});
  make("w", kRam, {1}, 1);
  core().budgets.host.set_limit(3 * kChunk - 1);
  EXPECT_THROW(demote(), StoreError);
  EXPECT_EQ(spilled_bytes(), 0u);
  EXPECT_EQ(core().budgets.host.held_bytes(), 0u);
  expect_resident("refused");
  EXPECT_EQ(demote({}, 2 * kChunk).totals().bytes, 2 * kChunk);
  EXPECT_EQ(spilled_bytes(), 2 * kChunk);
  EXPECT_EQ(core().counters.operation_failures, 1u);
  expect_resident("as far as there is room");
}

TEST_F(DemoteTest, TheRoundTripReusesHostHandles) {
  core().host_pool.set_capacity(4 * kChunk);
  make("w", kRam, {1, 2, 1});
  demote();
  promote();
  EXPECT_EQ(core().host_pool.kept_bytes(), 4 * kChunk);
  const size_t calls = sim().calls("cuMemCreate");
  demote();
  EXPECT_EQ(sim().calls("cuMemCreate"), calls) << "all of it comes from the pool";
  EXPECT_EQ(core().host_pool.kept_bytes(), 0u);
  expect_resident("demoted again");
}

// The pool was made ahead, of pieces for spills. Those of other sizes replace them; they serve what they fit.
TEST_F(DemoteTest, TheRoundTripReplacesWhatThePoolHasForSpills) {
  core().host_pool.set_capacity(128 * kMiB);
  core().host_pool.fill(0);
  make("w", kRam, {20, 20, 32});  // 40, 40 and 64 MiB
  demote();
  promote();
  EXPECT_LE(core().host_pool.kept_bytes(), 128 * kMiB);
  const size_t calls = sim().calls("cuMemCreate");
  demote({}, 104 * kMiB);
  EXPECT_EQ(sim().calls("cuMemCreate"), calls) << "all of it comes from the pool";
  expect_resident("demoted again");
}

TEST_F(DemoteTest, AnAbandonedOneGivesTheHostMemoryBack) {
  core().host_pool.set_capacity(4 * kChunk);
  make("w", kRam, {2, 1});
  claim(OperationKind::kDemote)->abandon();
  EXPECT_EQ(core().host_pool.kept_bytes(), 3 * kChunk) << "it was not mapped, so it is clear";
  EXPECT_EQ(spilled_bytes(), 0u);
  expect_resident("abandoned");
}

// It stays where it is, and is paused all the same. The policy of its region does not forbid it the host.
TEST_F(DemoteTest, Invariant2_APauseWithABackupLeavesItOnTheHost) {
  const DiskDirectory directory;
  for (const Policy& policy : {kRam, kRetained, kPinned, Policy{BackupKind::kDisk}, kNone}) {
    start();
    const size_t item = make("w", policy, {1, 1});
    const size_t part = make("w", policy, {1, 1});
    demote({"w"}, 3 * kChunk);
    const auto backup = policy.backup == BackupKind::kNone ? std::optional(BackupKind::kRam) : std::nullopt;
    EXPECT_EQ(pause({"w"}, backup).totals().bytes, kChunk);
    EXPECT_EQ(host_bytes(item) + host_bytes(part), 3 * kChunk);
    EXPECT_TRUE(find(item).is_paused.load());
    EXPECT_EQ(demote({"w"}).totals().bytes, 0u);
    EXPECT_EQ(promote({"w"}).totals().bytes, 0u);
    EXPECT_EQ(resume().totals().bytes, kChunk);
    EXPECT_EQ(host_bytes(item) + host_bytes(part), 3 * kChunk);
    expect_resident("resumed");
    promote();
    expect_resident("promoted");
  }
}

TEST_F(DemoteTest, WhatAPauseDropsComesBackWhereThereIsRoom) {
  const size_t item = make("w", kNone, {1, 1});
  demote();
  EXPECT_EQ(pause().totals().bytes, 0u);
  EXPECT_EQ(host_bytes(item), 0u);
  note_dropped();
  core().budgets.device.set_limit(kChunk);
  EXPECT_EQ(resume().totals().bytes, kChunk);
  EXPECT_EQ(host_bytes(item), kChunk) << "though its region does not overflow";
  expect_resident("resumed, as zeros");
}

// What a resume retains of the chunks that leave later is right once they are on the device again.
TEST_F(DemoteTest, ARetainedBackupIsUsedAgainAfterThePromotion) {
  make("w", kRetained, {1, 1});
  come_back();
  demote();
  pause();
  resume();
  promote();
  fill(items_[0].address, kChunk, 77);
  const Report report = pause();
  EXPECT_EQ(report.totals().copied, kChunk);
  EXPECT_EQ(report.totals().clean, kChunk);
  resume();
  EXPECT_TRUE(holds(items_[0].address, kChunk, 77));
  fill_item(0);
  expect_resident("resumed");
}

TEST_F(DemoteTest, ASwapAndATrimTakeItAsTheyTakeWhatSpilled) {
  make("out", kRam, {1, 1});
  const size_t in = make("in", kRam, {1});
  pause({"in"});
  demote({"out"}, kChunk);
  OperationRequest request;
  request.tags.names = {"out"};
  request.resume_tags.names = {"in"};
  const auto reports = Operation::claim(core(), OperationKind::kSwap, std::move(request))->commit();
  EXPECT_EQ(reports.front().totals().bytes, kChunk);
  EXPECT_EQ(reports.back().totals().bytes, kChunk);
  expect_sound("swapped");
  resume();
  expect_resident("all back");
  demote({"in"});
  trim({"in"}, {items_[in].address});
  EXPECT_EQ(host_bytes(in), 0u);
  expect_sound("trimmed");
  resume_at({"in"}, {items_[in].address});
  EXPECT_EQ(host_bytes(in), 0u) << "the device has room";
  expect_resident("back as zeros");
}

TEST_F(DemoteTest, ATagWithOpenRegionOrCaptureIsRefused) {
  make("w", kRam, {1});
  const LeaseInfo lease = open_lease(core(), "w", "thread 7");
  EXPECT_THROW(demote({"w"}), StateError);
  EXPECT_THROW(preview(OperationKind::kDemote, {"w"}), StateError);
  core().registry.leases.close(lease.id);
  EXPECT_EQ(preview(OperationKind::kDemote, {"w"}), std::vector<std::string>{"w"});
  core().capture_gate.begin_capture();
  EXPECT_THROW(demote({"w"}), StateError) << "Invariant 9";
  core().capture_gate.end_capture();
  EXPECT_THROW(demote({"unknown"}), StateError);
  EXPECT_EQ(demote({"w"}).totals().bytes, kChunk);
  EXPECT_TRUE(preview(OperationKind::kDemote, {"w"}).empty());
}

TEST_F(DemoteTest, Invariant5_TheDeviceIsSynchronisedBeforeAnythingIsCopied) {
  make("w", kRam, {1});
  sim().clear_log();
  demote();
  EXPECT_GE(sim().calls("cuCtxSynchronize"), 1u);
  const std::string log = calls_in_order();
  EXPECT_LT(log.find("cuCtxSynchronize"), log.find("cuMemcpyDtoDAsync"));
  EXPECT_LT(log.rfind("cuStreamSynchronize"), log.find("cuMemUnmap"));
}

TEST_F(DemoteTest, Invariant12_FreesAndMallocsGoOnBesideDemotionsAndPromotions) {
  core().host_pool.set_capacity(4 * kChunk);
  make("w", kRam, {1, 1});
  make("v", kRam, {1, 2});
  const auto churn = [&](const std::string& tag, bool reads) {
    return [this, tag, reads](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        const CUdeviceptr address = alloc(tag, 2 * kChunk);
        EXPECT_TRUE(!reads || is_zero(address, 2 * kChunk)) << "Invariant 2";
        deallocate(core(), address);
      }
    };
  };
  {
    std::jthread same(churn("w", false));  // an operation may hold what it makes
    std::jthread other(churn("t", true));
    std::jthread back([&](const std::stop_token& stop) {
      while (!stop.stop_requested()) promote();
    });
    for (int round = 0; round < 30; ++round) {
      demote({"w"});
      demote({"v"}, kChunk);
      if (round % 4 == 0) pause({"v"});
      if (round % 4 == 0) resume({"v"});
    }
  }
  expect_resident("in the end");
  free_all();
  expect_nothing_left();
}

TEST_F(DemoteTest, AFreeBesideItIsDoneAtItsEnd) {
  make("w", kRam, {1});
  make("w", kRam, {1});
  auto operation = claim(OperationKind::kDemote);
  deallocate(core(), items_.back().address);
  items_.pop_back();
  operation->commit();
  EXPECT_EQ(held_bytes(), 0u);
  EXPECT_EQ(spilled_bytes(), kChunk);
  expect_resident("demoted");
}

// The mapping of the host memory fails, and so does that of the old memory: the bytes wait in the host memory.
TEST_F(DemoteTest, Invariant3_AChunkThatCouldNotBeMappedIsWholeAndComesBack) {
  for (const bool is_freed : {false, true}) {
    start();
    const size_t item = make("w", kRam, {1, 1});
    sim().fail("cuMemMap", 3, kOther, 2);  // the first two map the spare range
    EXPECT_THROW(demote(), DriverError);
    sim().clear_failures();
    EXPECT_TRUE(find(item).chunks.front().is_detached.load());
    EXPECT_FALSE(find(item).chunks.back().is_detached.load());
    EXPECT_EQ(amounts("w").detached_bytes, kChunk);
    EXPECT_TRUE(is_partial("w"));
    EXPECT_EQ(held_bytes(), kChunk) << "the second chunk is untouched";
    expect_sound("detached");
    if (is_freed) {
      free_all();
      expect_nothing_left();
      continue;
    }
    EXPECT_EQ(resume().totals().copied, 0u);
    EXPECT_EQ(host_bytes(item), kChunk);
    EXPECT_FALSE(is_partial("w"));
    expect_resident("mapped again");
  }
}

TEST_F(DemoteTest, Invariant3_AMappingThatFailsLeavesTheOldMemory) {
  const size_t item = make("w", kRam, {1, 1});
  sim().fail("cuMemMap", 3, kOther, 1);
  EXPECT_THROW(demote(), DriverError);
  sim().clear_failures();
  EXPECT_EQ(host_bytes(item), 0u);
  EXPECT_FALSE(is_partial("w"));
  expect_resident("as before");
  EXPECT_EQ(core().budgets.host.held_bytes(), 0u);
}

}  // namespace
}  // namespace ebbtide::testing
