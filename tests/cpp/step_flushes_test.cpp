// When torch's cache is given back between two steps, because steps flush.
#include "policy/lms/flushes.h"

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

// It may find islands of others.
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
