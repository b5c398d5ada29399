// What plans leave of the limit, as shortages ask for it.
#include "policy/lms/margin.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "model_steps.h"
#include "played_step.h"

namespace ebbtide::policy {
namespace {

constexpr uint64_t kTokens = 4096;

TEST(StepMargin, AMarginGrowsAtOnceAndFallsSeldom) {
  Margin margin;
  EXPECT_FALSE(margin.note(0, 100'000));
  EXPECT_TRUE(margin.note(600, 100'000));
  EXPECT_TRUE(margin.note(400, 100'000));
  EXPECT_EQ(margin.bytes(100'000), 1000u);
  // Each time that a fall was too early, the next one takes twice as long.
  uint64_t patience = 32;
  for (int round = 0; round < 4; ++round, patience *= 2) {
    for (uint64_t step = 1; step < patience; ++step) EXPECT_FALSE(margin.note(0, 100'000));
    EXPECT_TRUE(margin.note(0, 100'000));
    EXPECT_EQ(margin.bytes(100'000), 750u);
    EXPECT_TRUE(margin.note(250, 100'000));
  }
  // It falls to nothing, and then nothing changes any more.
  uint64_t changes = 0;
  for (int step = 0; step < 400'000; ++step) changes += margin.note(0, 100'000) ? 1 : 0;
  EXPECT_EQ(margin.bytes(100'000), 0u);
  EXPECT_LT(changes, 60u);
  EXPECT_TRUE(margin.note(UINT64_MAX, 100'000));
  EXPECT_EQ(margin.bytes(100'000), 50'000u) << "at most half of the limit";
  EXPECT_FALSE(margin.note(1, 100));
  EXPECT_EQ(margin.bytes(1000), 500u) << "of a lower limit, too";
}

// It was short of the lower limit, and no pieces were the cause.
TEST(StepMargin, ALimitThatFallsInAStepIsNoMargin) {
  const StepRecord record = transformer_step(1280, kTokens);
  CheckedFollower checked;
  const StepRules high = copies_only(record, 1000);
  for (int step = 0; step < 3; ++step) play(checked, record, high);
  StepRules low = copies_only(record, 70);
  low.least_limit_bytes = low.limits.limit_bytes;
  play(checked, record, low);  // its plan was made for the higher one
  EXPECT_EQ(checked.follower.margin_bytes(), 0u);
}

TEST(StepMargin, AMarginSufficesInTheNextStep) {
  const StepRecord record = transformer_step(1280, kTokens);
  const uint64_t pieces_bytes = part_of_peak(record, 4);
  for (const StepRules& rules : {copies_only(record, 70), mixed(record, 50)}) {
    CheckedFollower checked;
    for (int step = 0; step < 10; ++step) play(checked, record, rules);
    // Free memory lies in pieces: as if the limit were lower, though nothing says so.
    StepRules tight = rules;
    tight.limits.limit_bytes -= pieces_bytes;
    const auto play_tight = [&] {
      return play(checked, record, tight, {.believed_limit_bytes = rules.limits.limit_bytes});
    };
    EXPECT_GT(play_tight().missing_bytes, 0u);
    EXPECT_LE(checked.follower.margin_bytes(), 2 * pieces_bytes);
    for (int step = 0; step < 15; ++step) EXPECT_EQ(play_tight().missing_bytes, 0u) << step;
    size_t short_steps = 0;
    for (int step = 0; step < 600; ++step) short_steps += play_tight().missing_bytes > 0 ? 1 : 0;
    EXPECT_GT(short_steps, 0u) << "it is tried with less";
    EXPECT_LE(short_steps, 6u) << "and more seldom each time";
  }
}

TEST(StepMargin, OneStepInPiecesIsLittleReasonForAMarginWhereMemoryHasPages) {
  const StepRecord record = transformer_step(1280, kTokens);
  for (const bool has_pages : {false, true}) {
    StepRules rules = copies_only(record, 70);
    rules.limits.has_pages = has_pages;
    CheckedFollower checked;
    for (int step = 0; step < 10; ++step) play(checked, record, rules);
    StepRules tight = rules;
    tight.limits.limit_bytes -= rules.limits.limit_bytes / 4;
    play(checked, record, tight, {.believed_limit_bytes = rules.limits.limit_bytes});
    const uint64_t most_bytes = rules.limits.limit_bytes / 16;
    EXPECT_EQ(checked.follower.margin_bytes() <= most_bytes, has_pages);
    EXPECT_GT(checked.follower.margin_bytes(), most_bytes / 2);
  }
}

// What lay in pieces in the step that was recorded, without a plan, will do so under the plan.
TEST(StepMargin, ThePiecesOfTheRecordedStepAreTheFirstMargin) {
  const StepRecord record = transformer_step(1280, kTokens);
  StepRules rules = copies_only(record, 70);
  const uint64_t most_bytes = rules.limits.limit_bytes / 16;
  for (const uint64_t useless_bytes : {uint64_t{0}, most_bytes / 2, 3 * most_bytes}) {
    for (const bool has_pages : {false, true}) {
      rules.limits.has_pages = has_pages;
      const KnownStep known(record, rules, useless_bytes);
      EXPECT_EQ(known.margin_bytes(), has_pages ? std::min(useless_bytes, most_bytes) : 0u);
    }
  }
  rules.limits.has_pages = true;
  StepFollower follower;
  follower.fell_short(0, most_bytes);  // before anything was saved, it says nothing of plans
  const uint64_t storage = follower.saved({.key = 1, .size_bytes = most_bytes}, most_bytes, 0);
  follower.fell_short(0, most_bytes / 2);
  follower.wanted(storage, most_bytes, 1);
  follower.dropped(storage);
  follower.fell_short(0, most_bytes);  // nor when all is gone
  follower.end_step(rules);
  EXPECT_EQ(follower.margin_bytes(), most_bytes / 2);
}

TEST(StepMargin, ADemandThatChangesNoPlanExplainsNoShortage) {
  const StepRecord record = transformer_step(1280, kTokens);
  const StepLimits limits = copies_only(record, 70).limits;
  TriedChoice tried(choose_steps(record, limits, {}).front());
  StepRecord step = record;
  step.events.front().demand_bytes += limits.limit_bytes / 8;
  const MatchedEvents matched = {{0, 0}, {1, 1}};
  tried.note(step, matched, 0);
  EXPECT_FALSE(tried.is_outdated(limits));
  EXPECT_EQ(tried.unexplained_bytes(matched, {{0, 700}}, limits, 0), 700u);
  // With that margin, the plan is made anew.
  const uint64_t margin_bytes = limits.limit_bytes - step.events.front().demand_bytes + 1;
  EXPECT_EQ(tried.unexplained_bytes(matched, {{0, 700}}, limits, margin_bytes), 0u);
}

// As where weights and gradients leave on demand: no plan of what is saved could hold the limit.
TEST(StepMargin, AShortageThatNoPlanCanAvoidIsNoMargin) {
  const StepRecord record = with_base(transformer_step(1280, kTokens), 10'000'000'000);
  const StepRules rules = rules_at(at_limit(9'000'000'000));
  CheckedFollower checked;
  for (int step = 0; step < 30; ++step) play(checked, record, rules);
  EXPECT_GT(play(checked, record, rules).missing_bytes, 0u);
  EXPECT_EQ(checked.follower.margin_bytes(), 0u);
}

}  // namespace
}  // namespace ebbtide::policy
