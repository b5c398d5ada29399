// When torch's cache is given back between two steps, because steps flush.
#include "policy/lms/flushes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "model_steps.h"
#include "played_step.h"
#include "policy/lms/known_step.h"
#include "policy/lms/step_choice.h"

namespace ebbtide::policy {
namespace {

using Advice = Flushes::Advice;

TEST(StepFlushes, TheCacheIsGivenBackOnceAndThenEverMoreSeldom) {
  Flushes flushes;
  EXPECT_EQ(flushes.note(false, true), Advice::kKeep);
  EXPECT_EQ(flushes.note(true, true), Advice::kGiveBack);
  for (uint64_t patience = 4; patience < 9000; patience *= 2) {
    for (uint64_t step = 0; step < std::min<uint64_t>(patience, 4096); ++step)
      ASSERT_EQ(flushes.note(true, true), Advice::kKeep) << patience << " " << step;
    EXPECT_EQ(flushes.note(true, true), Advice::kGiveBack) << patience;
  }
}

TEST(StepFlushes, WhereItHelpedForLongItIsGivenBackAsSoonAgain) {
  for (const int quiet_steps : {63, 64}) {
    Flushes flushes;
    flushes.note(true, true);
    for (int step = 0; step < quiet_steps; ++step) EXPECT_EQ(flushes.note(false, true), Advice::kKeep);
    EXPECT_EQ(flushes.note(true, true), Advice::kGiveBack);
    int patience = 0;
    while (flushes.note(true, true) == Advice::kKeep) ++patience;
    EXPECT_EQ(patience, quiet_steps == 63 ? 8 : 4);
  }
}

// The first choice evicts, and the last one does not.
class FlushingSteps : public testing::Test {
 protected:
  FlushingSteps() { rules_.limits.has_pages = true; }
  // slowness: how long it takes, as a part of its forecast.
  void note(KnownStep& known, bool had_update, bool has_flushed, const Shortages& shortages = {}, double slowness = 1) {
    rules_.had_update = had_update;
    rules_.has_flushed = has_flushed;
    StepRecord step = known.current().choice().record;
    for (StepEvent& event : step.events) event.seconds *= slowness;
    known.note(std::move(step), {{0, 0}, {1, 1}}, shortages, rules_);
  }
  void note_larger(KnownStep& known) {
    StepRecord step = known.current().choice().record;
    for (RecordedStorage& storage : step.storages) storage.size_bytes *= 2;
    known.note(std::move(step), {{0, 0}, {1, 1}}, {}, rules_);
  }
  KnownStep settled_without_evictions() {
    KnownStep known = known_that_evicts_nothing();
    for (int step = 0; step < 4; ++step) note(known, kBetweenSteps, false, {}, 0.5);
    EXPECT_TRUE(known.is_settled() && known.current().plan().evicts_nothing());
    return known;
  }
  void give_back(KnownStep& known, bool had_update = kBetweenSteps) {
    for (int step = 0; step < 64 && !known.must_give_back(); ++step) note(known, kBetweenSteps, true);
    EXPECT_TRUE(known.must_give_back());
    rules_.was_disturbed = true;  // it maps anew what it uses
    note(known, had_update, true);
    rules_.was_disturbed = false;
  }
  void flush_in_vain(KnownStep& known) {
    give_back(known);
    note(known, kBetweenSteps, true);
  }
  static size_t recomputed(const KnownStep& known) { return known.current().choice().recomputed.size(); }
  size_t recomputed_within(uint64_t limit_bytes) const {
    StepRules rules = rules_;
    rules.limits.limit_bytes = limit_bytes;
    return recomputed_least(KnownStep(record_, rules));
  }
  static size_t recomputed_least(const KnownStep& known) {
    EXPECT_TRUE(known.choices().back().plan().evicts_nothing());
    return known.choices().back().choice().recomputed.size();
  }
  KnownStep known_that_evicts_nothing() {
    KnownStep known(record_, rules_);
    EXPECT_EQ(known.choices().size(), 2u);
    for (int step = 0; step < 2; ++step) {
      EXPECT_FALSE(known.current().plan().evicts_nothing());
      note(known, kBetweenSteps, true);
      EXPECT_FALSE(known.must_give_back()) << "the next step would need to flush as well";
    }
    EXPECT_TRUE(known.current().plan().evicts_nothing());
    return known;
  }

  static constexpr bool kBetweenSteps = true, kBetweenMicroBatches = false;
  const StepRecord record_ = transformer_step(1280, 12 * 1024);
  StepRules rules_ = rules_at(at_limit(part_of_peak(record_, 84)));
};

TEST_F(FlushingSteps, TheCacheIsGivenBackAfterTheStepAndNotBetweenMicroBatches) {
  KnownStep known = known_that_evicts_nothing();
  for (int micro_batch = 0; micro_batch < 31; ++micro_batch) {
    note(known, kBetweenMicroBatches, micro_batch == 0);
    EXPECT_FALSE(known.must_give_back());
  }
  note(known, kBetweenSteps, false);
  EXPECT_TRUE(known.must_give_back());
  note(known, kBetweenMicroBatches, false);
  EXPECT_FALSE(known.must_give_back());
}

TEST_F(FlushingSteps, AFollowerTellsOnceForEachStep) {
  CheckedFollower checked;
  int given_back = 0, last_at = 0;
  for (int step = 0; step < 48; ++step) {
    rules_.has_flushed = given_back == 0 || step > last_at + 20;  // later, so that no more room is made
    const bool evicts_nothing =
        checked.follower.latest_choice() != nullptr && checked.follower.latest()->current().plan().evicts_nothing();
    play(checked, record_, rules_);
    if (step % 2 == 0) {
      checked.follower.abandon_step();
      EXPECT_FALSE(checked.follower.take_give_back()) << "a step of which nothing is learned asks for nothing";
    } else if (checked.follower.take_give_back()) {
      EXPECT_TRUE(evicts_nothing) << step;
      EXPECT_FALSE(checked.follower.take_give_back());
      ++given_back;
      last_at = step;
    }
  }
  EXPECT_GT(given_back, 0);
  EXPECT_LE(given_back, 2);
}

TEST_F(FlushingSteps, AFollowerWhoseStepsFlushWhateverIsDoneEndsWithOneChoice) {
  CheckedFollower checked;
  rules_.has_flushed = true;
  int given_back = 0;
  for (int step = 0; step < 64; ++step) {
    play(checked, record_, rules_);
    given_back += checked.follower.take_give_back() ? 1 : 0;
  }
  const KnownStep& known = *checked.follower.latest();
  EXPECT_EQ(known.choices().size(), 1u);
  EXPECT_TRUE(known.is_settled());
  EXPECT_TRUE(known.current().plan().evicts_nothing());
  EXPECT_GE(given_back, 3) << "for each that more room was made for";
  EXPECT_LE(given_back, 7);
}

TEST_F(FlushingSteps, WithoutPagesTheCacheStays) {
  KnownStep known = known_that_evicts_nothing();
  rules_.limits.has_pages = false;
  for (int step = 0; step < 8; ++step) {
    note(known, kBetweenSteps, true);
    EXPECT_FALSE(known.must_give_back());
  }
}

TEST_F(FlushingSteps, AFlushThatLaterStepsAreSparedTeachesNoMargin) {
  KnownStep known = known_that_evicts_nothing();
  const Shortages shortages = {{0, rules_.limits.limit_bytes / 32}};
  const uint64_t before_bytes = known.margin_bytes();
  note(known, kBetweenMicroBatches, true, shortages);
  note(known, kBetweenSteps, true, shortages);
  EXPECT_EQ(known.margin_bytes(), before_bytes);
  note(known, kBetweenSteps, true, shortages);
  EXPECT_GT(known.margin_bytes(), before_bytes);
}

// It is judged by steps that find memory as steps of its own have left it.
TEST_F(FlushingSteps, ATimeWithAFlushThatLaterStepsAreSparedDoesNotCount) {
  KnownStep known = known_that_evicts_nothing();
  const auto measured_steps = [&] { return known.choices()[1].measured_steps(); };
  note(known, kBetweenMicroBatches, true);
  EXPECT_EQ(measured_steps(), 1u);
  note(known, kBetweenSteps, true);
  EXPECT_EQ(measured_steps(), 1u);
  EXPECT_TRUE(known.must_give_back());
  rules_.was_disturbed = true;  // it maps anew what it uses
  note(known, kBetweenSteps, false);
  EXPECT_EQ(measured_steps(), 1u);
  EXPECT_FALSE(known.is_settled());
  rules_.was_disturbed = false;
  note(known, kBetweenSteps, false);
  EXPECT_EQ(measured_steps(), 2u);
}

TEST_F(FlushingSteps, WhatADisturbedStepFlushesIsNothingThatLaterOnesDo) {
  KnownStep known = known_that_evicts_nothing();
  rules_.was_disturbed = true;
  note(known, kBetweenSteps, true);
  EXPECT_FALSE(known.must_give_back());
}

// What torch caches for other streams, as those of FSDP2, is lost to the stream that runs the blocks.
TEST_F(FlushingSteps, WhereGivingBackHelpsForFewUpdatesPlansLeaveMoreFree) {
  for (const int quiet_updates : {0, 1, 13, 14, 15, 16, 40}) {
    KnownStep known = settled_without_evictions();
    give_back(known);
    const size_t before = recomputed(known);
    for (int update = 0; update < quiet_updates; ++update) note(known, kBetweenSteps, false, {}, 0.5);
    EXPECT_EQ(recomputed(known), before);
    note(known, kBetweenSteps, true);
    const uint64_t limit_bytes = rules_.limits.limit_bytes;
    const size_t expected = quiet_updates < 15 ? recomputed_within(limit_bytes - limit_bytes / 16) : before;
    EXPECT_EQ(recomputed_least(known), expected) << quiet_updates;
    EXPECT_EQ(known.is_settled(), expected == before) << "others may be faster now";
  }
}

// Times or a margin that became known, say, ask for it in the step after which all is given back.
TEST_F(FlushingSteps, WhatIsChosenAnewKnowsThatAllIsGivenBackBeforeIt) {
  KnownStep known = known_that_evicts_nothing();
  rules_.limits.limit_bytes -= rules_.limits.limit_bytes / 4;
  note(known, kBetweenSteps, true);
  ASSERT_TRUE(known.must_give_back());
  ASSERT_EQ(known.limits().limit_bytes, rules_.limits.limit_bytes);
  const size_t before = recomputed_least(known);
  rules_.was_disturbed = true;
  note(known, kBetweenSteps, true);
  rules_.was_disturbed = false;
  note(known, kBetweenSteps, true);
  EXPECT_FALSE(known.must_give_back());
  EXPECT_GT(recomputed_least(known), before);
}

TEST_F(FlushingSteps, RoomIsMadeAtOnceWhereAMarginWouldGrowStepByStep) {
  KnownStep known = settled_without_evictions();
  give_back(known);
  const uint64_t limit_bytes = rules_.limits.limit_bytes;
  note(known, kBetweenSteps, true, {{0, limit_bytes / 64}});
  EXPECT_GE(recomputed_least(known), recomputed_within(limit_bytes - limit_bytes / 16));
  EXPECT_GE(known.margin_bytes(), limit_bytes / 16);
}

TEST_F(FlushingSteps, AMarginGrowsByWhatIsMissingBesideTheRoom) {
  KnownStep known = settled_without_evictions();
  for (int time = 0; time < 2; ++time) flush_in_vain(known);
  const uint64_t before_bytes = known.margin_bytes(), missing_bytes = rules_.limits.limit_bytes / 64;
  note(known, kBetweenSteps, false, {{0, missing_bytes}});
  EXPECT_GT(known.margin_bytes(), before_bytes);
  EXPECT_LE(known.margin_bytes(), before_bytes + missing_bytes);
}

TEST_F(FlushingSteps, MoreRoomIsMadeTwiceAtMostForALimit) {
  KnownStep known = known_that_evicts_nothing();
  std::vector<size_t> found = {recomputed(known)};
  for (int time = 0; time < 6; ++time) {
    flush_in_vain(known);
    found.push_back(recomputed_least(known));
  }
  const uint64_t limit_bytes = rules_.limits.limit_bytes;
  EXPECT_GT(found[1], found[0]);
  EXPECT_GT(found[2], found[1]);
  EXPECT_EQ(found[2], recomputed_within(limit_bytes - limit_bytes / 16 * 2));
  EXPECT_EQ(std::vector<size_t>(found.begin() + 2, found.end()), std::vector<size_t>(5, found[2]));
  EXPECT_GE(known.margin_bytes(), limit_bytes / 16 * 2);
  known.choose(rules_);
  EXPECT_EQ(recomputed_least(known), found[2]) << "for the same limit it is known";
  rules_.limits.limit_bytes = limit_bytes / 2;
  note(known, kBetweenSteps, false);
  EXPECT_EQ(recomputed_least(known), recomputed_within(limit_bytes / 2));
}

TEST_F(FlushingSteps, WhereStepsAreNotAlikeTheChoiceWithTheBestForecastStays) {
  KnownStep known = known_that_evicts_nothing();
  note_larger(known);
  EXPECT_TRUE(known.is_settled());
  EXPECT_EQ(&known.current(), &known.choices()[0]);
  known = settled_without_evictions();
  note_larger(known);
  EXPECT_EQ(&known.current(), &known.choices()[1]) << "but for one that was measured";
}

TEST_F(FlushingSteps, WhereNoOtherPlanEvictsNothingItStays) {
  ForcedChoice forced;
  const std::vector<Block> blocks = find_blocks(record_, {});
  for (const Block& block : blocks) forced.recomputed.insert(record_.calls[block.call].name);
  StepRules given = rules_, without = rules_at(at_limit(part_of_peak(record_, 120)));
  given.forced = std::make_shared<const ForcedChoice>(forced);
  without.limits.has_pages = true;
  without.may_recompute = false;
  for (const StepRules& rules : {given, without}) {
    rules_ = rules;
    KnownStep known(record_, rules_);
    ASSERT_TRUE(known.current().plan().evicts_nothing());
    const size_t before = recomputed(known);
    const uint64_t margin_bytes = known.margin_bytes();
    for (int time = 0; time < 3; ++time) flush_in_vain(known);
    EXPECT_EQ(recomputed(known), before);
    EXPECT_EQ(known.margin_bytes(), margin_bytes);
  }
}

TEST_F(FlushingSteps, MicroBatchesAreNoUpdates) {
  for (const int micro_batches : {1, 2, 3, 8}) {
    for (const int quiet_updates : {13, 14, 15}) {
      KnownStep known = settled_without_evictions();
      give_back(known, micro_batches == 1);
      const size_t before = recomputed(known);
      for (int step = 1; step < micro_batches; ++step) note(known, step + 1 == micro_batches, false);
      for (int step = 0; step < quiet_updates * micro_batches; ++step)
        note(known, (step + 1) % micro_batches == 0, false);
      EXPECT_EQ(recomputed(known), before);
      note(known, micro_batches == 1, true);
      EXPECT_EQ(recomputed_least(known) > before, quiet_updates < 15) << micro_batches << " " << quiet_updates;
    }
  }
}

TEST_F(FlushingSteps, StepsOfAnotherSizeAskForNoMoreRoom) {
  KnownStep known = settled_without_evictions();
  give_back(known);
  const size_t before = recomputed(known);
  rules_.has_flushed = true;
  note_larger(known);
  EXPECT_EQ(recomputed(known), before);
}

// It may find the islands of choices that evict, which were measured before it.
TEST_F(FlushingSteps, EachTimeThatChoicesAreMadeTheCacheIsGivenBackAsSoon) {
  KnownStep known = known_that_evicts_nothing();
  for (int time = 0; time < 2; ++time) flush_in_vain(known);  // all the room is made
  known.choose(rules_);
  for (int time = 0; time < 8; ++time) {
    note(known, kBetweenSteps, true);
    EXPECT_TRUE(known.must_give_back()) << time;
    for (int step = 0; step < 4; ++step) note(known, kBetweenSteps, true);
    const uint64_t margin_bytes = known.margin_bytes();
    known.choose(rules_);
    ASSERT_TRUE(known.current().plan().evicts_nothing());
    EXPECT_EQ(known.margin_bytes(), margin_bytes);
  }
}

}  // namespace
}  // namespace ebbtide::policy
