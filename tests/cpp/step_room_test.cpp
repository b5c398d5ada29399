// What choices leave free of the limit, because steps flush though the cache was given back not long before.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "flushing_steps.h"
#include "policy/lms/known_step.h"
#include "policy/lms/step_choice.h"

namespace ebbtide::policy {
namespace {

// What torch caches for other streams, as those of FSDP2, is lost to the stream that runs the blocks.
TEST_F(FlushingSteps, WhereGivingBackHelpsForFewUpdatesAndStepsPlansLeaveMoreFree) {
  for (const int micro_batches : {1, 2, 3, 8, 32}) {
    for (const int quiet_updates : {0, 1, 6, 7, 13, 14, 15, 40}) {
      KnownStep known = settled_without_evictions();
      give_back(known, micro_batches == 1);
      const size_t before = recomputed(known);
      for (int step = 1; step < (quiet_updates + 1) * micro_batches; ++step)
        note(known, (step + 1) % micro_batches == 0, false);
      EXPECT_EQ(recomputed(known), before);
      note(known, micro_batches == 1, true);
      const bool is_soon = quiet_updates < 15 && (quiet_updates + 1) * micro_batches < 64;
      const uint64_t limit_bytes = rules_.limits.limit_bytes;
      EXPECT_EQ(recomputed_least(known), is_soon ? recomputed_within(limit_bytes - limit_bytes / 16) : before)
          << micro_batches << " " << quiet_updates;
      EXPECT_EQ(known.is_settled(), !is_soon) << "others may be faster now";
    }
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
  known.choose(rules_);
  EXPECT_EQ(recomputed_least(known), found[2]) << "for the same limit it is known";
  rules_.limits.limit_bytes = limit_bytes / 2;
  KnownStep chosen_again = known;
  note(known, kBetweenSteps, false);
  EXPECT_EQ(recomputed_least(known), recomputed_within(limit_bytes / 2));
  chosen_again.choose(rules_);
  EXPECT_EQ(recomputed_least(chosen_again), recomputed_within(limit_bytes / 2));
}

// A limit that is a little lower, or a step that has grown a little, finds it.
TEST_F(FlushingSteps, PlansOfAChoiceMayUseTheRoom) {
  for (const uint64_t percent : {82, 86, 89}) {
    rules_.limits.limit_bytes = part_of_peak(record_, percent);
    KnownStep known(record_, rules_);
    for (int time = 0; time < 2; ++time) flush_in_vain(known);
    for (int step = 0; step < 12; ++step)
      note(known, kBetweenSteps, false, {}, known.current().plan().evicts_nothing() ? 1 : 2);
    ASSERT_TRUE(known.current().plan().evicts_nothing());
    const size_t before = recomputed(known);
    rules_.limits.limit_bytes = rules_.limits.limit_bytes / 100 * 89;
    for (int step = 0; step < 8; ++step) note(known, kBetweenSteps, false);
    EXPECT_EQ(recomputed(known), before);
    EXPECT_TRUE(known.current().plan().evicts_nothing()) << percent;
  }
}

TEST_F(FlushingSteps, RoomEndsWhereAllWouldEvictBecauseOfIt) {
  const auto can_stay = [](const KnownStep& known) {
    return std::any_of(known.choices().begin(), known.choices().end(),
                       [](const TriedChoice& tried) { return tried.plan().evicts_nothing(); });
  };
  size_t grown = 0;
  for (uint64_t percent = 14; percent < 22; ++percent) {
    rules_.limits.limit_bytes = part_of_peak(record_, percent);
    KnownStep known(record_, rules_);
    if (!known.current().plan().evicts_nothing()) continue;
    for (int time = 0; time < 2; ++time) flush_in_vain(known);
    StepRecord step = known.current().choice().record;
    for (StepEvent& event : step.events) event.demand_bytes += rules_.limits.limit_bytes / 5;
    rules_.has_flushed = false;
    note(known, std::move(step));
    const bool could_stay = can_stay(KnownStep(known.whole(), rules_));
    EXPECT_EQ(can_stay(known), could_stay) << percent;
    grown += could_stay ? 1 : 0;
  }
  EXPECT_GT(grown, 0u);
}

TEST_F(FlushingSteps, WhereRoomWouldOnlyEvictThereIsNone) {
  rules_.may_recompute = false;
  rules_.limits.limit_bytes = part_of_peak(record_, 104);
  KnownStep known(record_, rules_);
  for (int time = 0; time < 3; ++time) {
    flush_in_vain(known);
    EXPECT_TRUE(known.current().plan().evicts_nothing());
    EXPECT_TRUE(known.is_settled());
  }
}

TEST_F(FlushingSteps, WithoutPagesThereIsNoRoom) {
  KnownStep known = settled_without_evictions();
  for (int time = 0; time < 2; ++time) flush_in_vain(known);
  rules_.limits.has_pages = false;
  rules_.limits.out_bytes_per_second = rules_.limits.in_bytes_per_second = 1e6;  // nothing leaves by choice
  known.choose(rules_);
  const KnownStep fresh(record_, rules_);
  EXPECT_EQ(recomputed(known), recomputed(fresh));
  EXPECT_EQ(known.current().choice().moved_bytes, fresh.current().choice().moved_bytes);
  rules_.limits.has_pages = true;
  known.choose(rules_);
  EXPECT_EQ(recomputed_least(known), recomputed_within(rules_.limits.limit_bytes));
}

// After the limit was raised a little, the choice leaves more free than others for less than the limit.
TEST_F(FlushingSteps, WhatLeavesLessFreeIsNoRoom) {
  rules_.limits.limit_bytes = part_of_peak(record_, 82);
  KnownStep known(record_, rules_);
  for (int step = 0; step < 12; ++step) note(known, kBetweenSteps, false);
  const size_t before = recomputed(known);
  rules_.limits.limit_bytes = rules_.limits.limit_bytes / 100 * 112;
  note(known, kBetweenSteps, false);
  ASSERT_EQ(recomputed(known), before);
  flush_in_vain(known);
  EXPECT_GT(recomputed_least(known), before) << "the second room";
}

TEST_F(FlushingSteps, StatesThatLeaveMakeRoomToo) {
  rules_.may_recompute = false;
  rules_.limits.limit_bytes = part_of_peak(record_, 103);
  rules_.limits.state_bytes = rules_.limits.limit_bytes / 2;
  rules_.limits.steps_per_update = 1000;
  KnownStep known(record_, rules_);
  ASSERT_TRUE(known.current().plan().evicts_nothing());
  const uint64_t before_bytes = known.current().choice().state_bytes;
  flush_in_vain(known);
  EXPECT_GT(known.current().choice().state_bytes, before_bytes);
}

// As soon as it is planned again, within the whole limit, it would be the choice from before.
TEST_F(FlushingSteps, NoChoiceEvictsForRoom) {
  size_t others = 0;
  for (uint64_t percent = 70; percent < 98; percent += 2) {
    rules_.limits.limit_bytes = part_of_peak(record_, percent);
    KnownStep known(record_, rules_);
    others += known.choices().size() - 1;
    for (int step = 0; step < 12; ++step)
      note(known, kBetweenSteps, false, {}, known.current().plan().evicts_nothing() ? 1 : 2);
    flush_in_vain(known);
    for (const TriedChoice& tried : known.choices()) EXPECT_TRUE(tried.plan().evicts_nothing()) << percent;
    const size_t roomier = recomputed(known);
    rules_.limits.limit_bytes -= 1;
    for (int step = 0; step < 8; ++step) note(known, kBetweenSteps, false);
    EXPECT_EQ(recomputed(known), roomier) << percent;
  }
  EXPECT_GT(others, 0u);
}

// Demands that are corrected since are no less room.
TEST_F(FlushingSteps, StepsThatTakeLessThanRecordedHaveRoomToo) {
  KnownStep known = settled_without_evictions();
  const size_t before = recomputed(known);
  const uint64_t less_bytes = rules_.limits.limit_bytes / 8;
  const StepRecord recorded = known.current().choice().record;
  for (int step = 0; step < 6; ++step) {
    StepRecord smaller = recorded;
    for (StepEvent& event : smaller.events) event.demand_bytes -= std::min(event.demand_bytes, less_bytes);
    rules_.limits.limit_bytes ^= 1;  // it is planned again
    rules_.has_flushed = false;
    note(known, std::move(smaller));
  }
  flush_in_vain(known);
  EXPECT_GT(recomputed_least(known), before);
}

// Of these nothing is noted.
TEST_F(FlushingSteps, FlushesBeforeATimeOfEvictionsAreLongPast) {
  KnownStep known = settled_without_evictions();
  give_back(known);
  const size_t before = recomputed(known);
  const uint64_t limit_bytes = rules_.limits.limit_bytes;
  rules_.limits.limit_bytes = limit_bytes / 100 * 92;
  for (int step = 0; step < 100; ++step) note(known, kBetweenSteps, false);
  ASSERT_FALSE(known.current().plan().evicts_nothing());
  rules_.limits.limit_bytes = limit_bytes;
  note(known, kBetweenSteps, false);
  ASSERT_TRUE(known.current().plan().evicts_nothing());
  note(known, kBetweenSteps, true);
  EXPECT_EQ(recomputed(known), before);
}

TEST_F(FlushingSteps, ForecastsAreThoseOfAStepWithoutRoom) {
  KnownStep known = settled_without_evictions();
  for (int time = 0; time < 2; ++time) flush_in_vain(known);
  const uint64_t peak_bytes = known.limit_without_evictions(part_of_peak(record_, 100));
  EXPECT_TRUE(known.choice_within(peak_bytes + 100).recomputed.empty());
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

TEST_F(FlushingSteps, StepsOfAnotherSizeAskForNoMoreRoom) {
  KnownStep known = settled_without_evictions();
  give_back(known);
  const size_t before = recomputed(known);
  rules_.has_flushed = true;
  note_larger(known);
  EXPECT_EQ(recomputed_least(known), before);
  EXPECT_TRUE(known.is_settled());
  note(known, kBetweenSteps, true);
  EXPECT_FALSE(known.is_settled()) << "there is more room for usual ones";
}

}  // namespace
}  // namespace ebbtide::policy
