// Host memory that a promotion keeps, so that unchanged memory goes back without a copy.
#include "moves_faults.h"
#include "overflow_world.h"

namespace ebbtide::testing {
namespace {

class HostTwinsTest : public OverflowWorld {
 protected:
  Report promote_and_keep(uint64_t max_bytes = kUnlimited) {
    const Report report = promote({}, max_bytes, true);
    core().engines.trim();  // whose rings count on the host, too
    return report;
  }
  Report demote_again() {
    const Report report = demote();
    core().engines.trim();
    return report;
  }
  uint64_t on_host() { return core().budgets.host.held_bytes(); }
};

TEST_F(HostTwinsTest, WhatHasNotChangedGoesBackWithoutACopy) {
  for (const Policy& policy : {kRam, kRetained, kNone, kSplitRam}) {
    start();
    const size_t item = make("w", policy, {1, 3});
    demote();
    for (int turn = 0; turn < 2; ++turn) {
      EXPECT_EQ(promote_and_keep().totals().copied, 4 * kChunk);
      EXPECT_EQ(host_bytes(item), 0u);
      EXPECT_EQ(on_host(), 4 * kChunk) << "it counts";
      const size_t calls = sim().calls("cuMemcpyDtoDAsync");
      const size_t made = sim().calls("cuMemCreate");
      const Report report = demote_again();
      EXPECT_EQ(sim().calls("cuMemcpyDtoDAsync"), calls);
      EXPECT_EQ(sim().calls("cuMemCreate"), made);
      EXPECT_EQ(report.totals().bytes, 4 * kChunk);
      EXPECT_EQ(report.totals().copied, 0u);
      EXPECT_EQ(report.totals().clean, 4 * kChunk);
      EXPECT_EQ(host_bytes(item), 4 * kChunk);
      EXPECT_EQ(on_host(), 4 * kChunk);
      expect_resident("demoted");
    }
    EXPECT_EQ(core().counters.bytes_demoted, 12 * kChunk);
    free_all();
    expect_nothing_left();
  }
}

TEST_F(HostTwinsTest, BlocksThatHaveChangedAreCopied) {
  make("w", kRam, {3});
  demote();
  promote_and_keep();
  fill(items_[0].address + kChunk, kChunk, 77);
  const Report report = demote_again();
  EXPECT_EQ(report.totals().copied, kChunk);
  EXPECT_EQ(report.totals().clean, 2 * kChunk);
  EXPECT_TRUE(holds(items_[0].address + kChunk, kChunk, 77));
  fill_item(0);
  promote_and_keep();
  fill_item(0);
  EXPECT_EQ(demote_again().totals().copied, 0u) << "the same bytes again";
  expect_resident("demoted");
}

TEST_F(HostTwinsTest, OnlyRequestedTwinsAreKept) {
  make("w", kRam, {1, 1});
  demote();
  promote();
  EXPECT_EQ(on_host(), 0u);
  EXPECT_EQ(demote_again().totals().copied, 2 * kChunk);
  promote_and_keep(kChunk);
  EXPECT_EQ(on_host(), 2 * kChunk);
  promote();
  EXPECT_EQ(on_host(), kChunk);
  const Report report = demote_again();
  EXPECT_EQ(report.totals().clean, kChunk);
  EXPECT_EQ(report.totals().copied, kChunk);
  expect_resident("demoted");
}

TEST_F(HostTwinsTest, RulesThatCopyEverythingHold) {
  make("w", kRam, {2});
  demote();
  core().rules.skip.clean = false;
  promote_and_keep();
  EXPECT_EQ(on_host(), 0u);
  core().rules.skip.clean = true;
  demote_again();
  promote_and_keep();
  core().rules.skip.clean = false;
  EXPECT_EQ(demote_again().totals().copied, 2 * kChunk);
  expect_resident("demoted");
}

TEST_F(HostTwinsTest, Invariant7_ItGoesWhereTheHostHasNoRoomForSomethingElse) {
  make("w", kRam, {1, 1});
  demote();
  promote_and_keep();
  make("v", kRam, {1, 1});
  core().budgets.host.set_limit(3 * kChunk);
  EXPECT_EQ(demote({"v"}).totals().copied, 2 * kChunk);
  core().engines.trim();
  EXPECT_EQ(on_host(), 3 * kChunk) << "one of the two has gone, the oldest";
  core().budgets.host.set_limit(kUnlimited);
  const Report report = demote_again();
  EXPECT_EQ(report.totals().clean, kChunk);
  EXPECT_EQ(report.totals().copied, kChunk);
  expect_resident("demoted");
}

TEST_F(HostTwinsTest, FreesAndPausesAndTheTwinsOwnerGiveItBack) {
  make("w", kRam, {1});
  make("v", kNone, {1});
  make("u", kRam, {1});
  demote();
  promote_and_keep();
  deallocate(core(), items_.front().address);
  items_.erase(items_.begin());
  EXPECT_EQ(on_host(), 2 * kChunk);
  pause({"v"});
  core().engines.trim();
  EXPECT_EQ(on_host(), kChunk);
  EXPECT_EQ(core().host_pool.twins().give_way(kUnlimited), kChunk);
  EXPECT_EQ(core().host_pool.twins().give_way(kUnlimited), 0u);
  EXPECT_EQ(on_host(), 0u);
}

TEST_F(HostTwinsTest, AnAbandonedDemotionCopiesTheNextTime) {
  make("w", kRam, {2});
  demote();
  promote_and_keep();
  claim(OperationKind::kDemote)->abandon();
  core().engines.trim();
  EXPECT_EQ(on_host(), 0u);
  EXPECT_EQ(demote_again().totals().copied, 2 * kChunk);
  expect_resident("demoted");
}

}  // namespace
}  // namespace ebbtide::testing
