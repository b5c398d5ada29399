// What plans leave of the limit, as shortages ask for it.
#include "policy/lms/margin.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

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

// All blocks are recomputed, and that needs a limit of a little less in pages, where nothing leaves.
struct AllRecomputed {
  StepRecord record = transformer_step(1280, kTokens);
  StepRules rules;
  AllRecomputed() {
    for (ModuleCall& call : record.calls) call.input_bytes = 0;  // which the step saves in any case
    const std::vector<Block> blocks = find_blocks(record, {});
    ForcedChoice forced;
    for (const Block& block : blocks) forced.recomputed.insert(record.calls[block.call].name);
    const uint64_t peak = peak_bytes(choose_forced(record, at_limit(UINT64_MAX), blocks, forced).record);
    rules = rules_at(at_limit(peak + peak / 31 + 31));
    rules.limits.has_pages = true;
    rules.forced = std::make_shared<const ForcedChoice>(forced);
  }
};

TEST(StepMargin, WhatEvictsNothingNeedsNoMarginForPieces) {
  AllRecomputed step;
  uint64_t& limit_bytes = step.rules.limits.limit_bytes;
  const KnownStep unmoved(step.record, step.rules, limit_bytes / 16);
  EXPECT_TRUE(unmoved.current().plan().departures.empty());
  EXPECT_EQ(unmoved.margin_bytes(), limit_bytes / 32);
  limit_bytes -= limit_bytes / 64;
  const KnownStep moved(step.record, step.rules, limit_bytes / 16);
  EXPECT_FALSE(moved.current().plan().departures.empty());
  EXPECT_EQ(moved.margin_bytes(), limit_bytes / 16);
}

TEST(StepMargin, APlanThatEvictsNothingLeavesWhatItsOwnStepsMissed) {
  AllRecomputed all;
  const uint64_t limit_bytes = all.rules.limits.limit_bytes;
  // Of steps that evict it learns nothing.
  StepRules lower = all.rules;
  lower.limits.limit_bytes -= limit_bytes / 64;
  KnownStep evicting(all.record, lower, limit_bytes / 16);
  const StepRecord evicted = evicting.current().choice().record;
  evicting.note(evicted, {{0, 0}, {1, 1}}, {{0, limit_bytes / 32}}, all.rules);
  EXPECT_TRUE(evicting.current().plan().evicts_nothing());
  // And of its own as much as was missing.
  all.rules.limits.limit_bytes += limit_bytes / 60;
  const uint64_t more_bytes = all.rules.limits.limit_bytes / 64;
  KnownStep known(all.record, all.rules, limit_bytes / 16);
  const StepRecord step = known.current().choice().record;
  known.note(step, {{0, 0}, {1, 1}}, {{0, more_bytes}}, all.rules);
  EXPECT_TRUE(known.current().plan().evicts_nothing());
  EXPECT_EQ(known.margin_bytes(), all.rules.limits.limit_bytes / 32 + more_bytes);
}

// A step that flushes finds memory as others have left it, and those after it do not.
TEST(StepMargin, AMarginIsLearnedFromStepsThatNoFlushDisturbs) {
  AllRecomputed all;
  all.rules.has_flushed = true;
  const uint64_t limit_bytes = all.rules.limits.limit_bytes;
  KnownStep known(all.record, all.rules, limit_bytes / 16);
  StepRecord step = known.current().choice().record;
  step.events.front().demand_bytes = limit_bytes / 64 * 61;  // below what the plan leaves, and above what others do
  const auto note = [&](KnownStep& it) { it.note(step, {{0, 0}, {1, 1}}, {{0, limit_bytes / 32}}, all.rules); };
  note(known);
  EXPECT_EQ(known.margin_bytes(), limit_bytes / 32);
  EXPECT_TRUE(known.current().plan().evicts_nothing());
  note(known);
  EXPECT_EQ(known.margin_bytes(), limit_bytes / 16) << "plans with evictions have left as much before";
  EXPECT_FALSE(known.current().plan().evicts_nothing());
  // Without pages there is one margin, and each shortage counts.
  all.rules.limits.has_pages = false;
  KnownStep other(all.record, all.rules, limit_bytes / 16);
  note(other);
  EXPECT_EQ(other.margin_bytes(), limit_bytes / 32);
  // A program may turn pages on and off.
  all.rules.limits.has_pages = true;
  KnownStep switched(all.record, all.rules, limit_bytes / 16);
  all.rules.limits.has_pages = false;
  switched.note(known.current().choice().record, {{0, 0}, {1, 1}}, {}, all.rules);
  EXPECT_EQ(switched.margin_bytes(), limit_bytes / 16);
}

TEST(StepMargin, AShortageWhereNothingIsEvictedIsMetByEvictions) {
  const AllRecomputed step;
  const uint64_t limit_bytes = step.rules.limits.limit_bytes;
  CheckedFollower checked;
  for (int number = 0; number < 10; ++number) play(checked, step.record, step.rules);
  EXPECT_EQ(play(checked, step.record, step.rules).moved_bytes, 0u);
  StepRules tight = step.rules;
  const auto play_tight = [&] { return play(checked, step.record, tight, {.believed_limit_bytes = limit_bytes}); };
  tight.limits.limit_bytes = peak_bytes(play_tight().happened) - limit_bytes / 64;
  EXPECT_GT(play_tight().missing_bytes, 0u);
  for (int number = 0; number < 15; ++number) {
    const PlayedStep played = play_tight();
    EXPECT_EQ(played.missing_bytes, 0u) << number;
    EXPECT_GT(played.moved_bytes, 0u) << number;
  }
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
