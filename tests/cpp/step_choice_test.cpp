// Mixes of copies and recomputation: beside simple rules, and beside all mixes where these are few.
#include "policy/lms/step_choice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <utility>
#include <vector>

#include "model_steps.h"
#include "policy/lms/step_plan.h"
#include "policy/lms/tried_choice.h"
#include "step_replay.h"

namespace ebbtide::policy {
namespace {

StepLimits limits_at(const StepRecord& record, uint64_t percent) {
  return at_limit(peak_bytes(record) / 100 * percent);
}

StepChoice choose(const StepRecord& record, const StepLimits& limits) {
  return choose_steps(record, limits, find_blocks(record, {})).front();
}

struct Outcome {
  uint64_t excess_bytes;
  double seconds;
};

Outcome outcome_of(const StepRecord& record, const std::vector<Block>& recomputed, const StepLimits& limits) {
  const StepRecord changed = with_recomputation(record, recomputed);
  const StepPlan plan = make_plan(changed, limits);
  return {plan.excess_bytes, forecast_seconds(changed, plan, limits)};
}

// A choice that holds the limit comes before any that does not. What exceeds it by a part in 64 counts as holding it.
void expect_no_worse(const StepChoice& choice, const Outcome& other, const StepLimits& limits) {
  const uint64_t unit = limits.limit_bytes / 64;
  const uint64_t excess = choice.plan.excess_bytes / unit, other_excess = other.excess_bytes / unit;
  EXPECT_LE(excess, other_excess);
  EXPECT_TRUE(excess < other_excess || choice.seconds <= other.seconds + 1e-9);
}

std::vector<StepRecord> models() {
  return {transformer_step(1280, 12 * 1024), transformer_step(4096, 4096), transformer_step(12288, 2048),
          convolutional_step()};
}

TEST(StepChoice, NoSimpleRuleIsFaster) {
  for (const StepRecord& record : models()) {
    const std::vector<Block> blocks = find_blocks(record, {});
    ASSERT_EQ(blocks.size(), 24u);
    for (const uint64_t percent : {85, 70, 50, 35}) {
      SCOPED_TRACE(testing::Message() << peak_bytes(record) << " at " << percent << " %");
      const StepLimits limits = limits_at(record, percent);
      const StepChoice choice = choose(record, limits);
      EXPECT_EQ(choice.plan.excess_bytes, 0u);
      EXPECT_DOUBLE_EQ(choice.seconds, outcome_of(record, choice.recomputed, limits).seconds);
      EXPECT_GE(choice.seconds, record.events.back().seconds - 1e-9);
      expect_no_worse(choice, outcome_of(record, {}, limits), limits);
      expect_no_worse(choice, outcome_of(record, blocks, limits), limits);
      for (size_t stride = 2; stride <= blocks.size(); ++stride) {
        for (size_t first = 0; first < stride; ++first) {
          std::vector<Block> taken;
          for (size_t block = first; block < blocks.size(); block += stride) taken.push_back(blocks[block]);
          const Outcome other = outcome_of(record, taken, limits);
          EXPECT_LE(choice.seconds, 1.01 * other.seconds) << "each " << stride << "th from the " << first << "th";
          if (first == 0) expect_no_worse(choice, other, limits);
        }
      }
    }
  }
}

TEST(StepChoice, OfANarrowTransformerOnlySoMuchIsRecomputedAsIsNeeded) {
  const StepRecord record = transformer_step(1280, 12 * 1024);
  const double plain = record.events.back().seconds;
  const std::vector<Block> blocks = find_blocks(record, {});
  const StepLimits limits = limits_at(record, 85);
  const StepChoice choice = choose(record, limits);
  EXPECT_LE(choice.seconds, 1.10 * plain);
  // Without any copy, so many would be needed.
  size_t needed = 0;
  while (!make_plan(with_recomputation(record, {blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(needed)}),
                    limits)
              .departures.empty())
    ++needed;
  EXPECT_LE(choice.recomputed.size(), needed + 1);
  EXPECT_LT(needed, 6u);
  // The others of section 1's figures.
  EXPECT_LE(choose(record, limits_at(record, 70)).seconds, 1.10 * plain);
  EXPECT_LE(choose(record, limits_at(record, 50)).seconds, 1.16 * plain);
  EXPECT_LE(choose(record, limits_at(record, 35)).seconds, 1.22 * plain);
}

TEST(StepChoice, OfAWideTransformerCopiesArePreferred) {
  const StepRecord record = transformer_step(12288, 2048);
  for (const uint64_t percent : {85, 70, 50, 35}) {
    const StepChoice choice = choose(record, limits_at(record, percent));
    EXPECT_TRUE(choice.recomputed.empty()) << percent;
    EXPECT_LE(choice.seconds, 1.001 * record.events.back().seconds);
    EXPECT_GE(choice.moved_bytes, peak_bytes(record) / 100 * (100 - percent));
  }
}

TEST(StepChoice, OfAConvolutionalNetworkTheFirstBlocksAreRecomputed) {
  const StepRecord record = convolutional_step();
  const StepChoice choice = choose(record, limits_at(record, 50));
  ASSERT_FALSE(choice.recomputed.empty());
  EXPECT_LE(choice.recomputed.size(), 8u);
  EXPECT_LE(choice.recomputed.back().call, 12u) << "they are large and fast";
  EXPECT_LE(choice.seconds, 1.05 * record.events.back().seconds);
}

TEST(StepChoice, WhereEverythingFitsNothingHappens) {
  for (const StepRecord& record : models()) {
    const std::vector<StepChoice> choices = choose_steps(record, at_limit(peak_bytes(record)), find_blocks(record, {}));
    ASSERT_EQ(choices.size(), 1u);
    EXPECT_TRUE(choices[0].recomputed.empty() && choices[0].plan.actions.empty());
    EXPECT_EQ(choices[0].moved_bytes, 0u);
    EXPECT_DOUBLE_EQ(choices[0].seconds, record.events.back().seconds);
  }
  const std::vector<StepChoice> nothing = choose_steps({}, {}, {});
  ASSERT_EQ(nothing.size(), 1u);
  EXPECT_EQ(nothing[0].seconds, 0);
}

// Blocks of equal, falling or random sizes and times.
StepRecord random_blocks(std::mt19937_64& random, size_t count) {
  std::vector<BlockShape> blocks;
  const uint64_t kind = random() % 3, pace = 1 + random() % 10;
  for (size_t block = 0; block < count; ++block) {
    const uint64_t unit = kind == 0   ? 100'000'000
                          : kind == 1 ? uint64_t{400'000'000} >> (3 * block / count)
                                      : 20'000'000 + random() % 300'000'000;
    const double seconds = 1e-3 * static_cast<double>(kind == 0 ? pace : 1 + random() % 5);
    blocks.push_back({unit, {unit, 2 * unit, unit, unit / 2}, seconds});
  }
  return block_step(blocks, 300'000'000, 100'000'000);
}

TEST(StepChoice, FewMixesAreFaster) {
  std::mt19937_64 random(51);
  double all_chosen = 0, all_best = 0;
  for (int round = 0; round < 60; ++round) {
    const StepRecord record = random_blocks(random, 8);
    const StepLimits limits = limits_at(record, 30 + random() % 60);
    const std::vector<Block> blocks = find_blocks(record, {});
    const StepChoice choice = choose(record, limits);
    double best = choice.seconds;
    for (uint32_t mix = 0; mix < (1u << blocks.size()); ++mix) {
      std::vector<Block> taken;
      for (size_t block = 0; block < blocks.size(); ++block)
        if ((mix >> block & 1) != 0) taken.push_back(blocks[block]);
      const Outcome other = outcome_of(record, taken, limits);
      EXPECT_GE(other.excess_bytes / (limits.limit_bytes / 64) + 1,
                choice.plan.excess_bytes / (limits.limit_bytes / 64));
      if (other.excess_bytes == 0) best = std::min(best, other.seconds);
    }
    EXPECT_LE(choice.seconds, 1.10 * best);
    all_chosen += choice.seconds;
    all_best += best;
  }
  EXPECT_LE(all_chosen, 1.02 * all_best);
}

TEST(StepChoice, ChoicesAreOfOtherKindsAndNearTheBest) {
  std::mt19937_64 random(52);
  size_t several = 0;
  for (int round = 0; round < 100; ++round) {
    const StepRecord record = random_blocks(random, 4 + random() % 40);
    const StepLimits limits = limits_at(record, 20 + random() % 90);
    const std::vector<Block> blocks = find_blocks(record, {});
    const std::vector<StepChoice> choices = choose_steps(record, limits, blocks);
    ASSERT_FALSE(choices.empty());
    ASSERT_LE(choices.size(), 3u);
    std::vector<size_t> kinds;
    for (const StepChoice& choice : choices) {
      EXPECT_LE(choice.seconds, 1.2 * choices.front().seconds);
      EXPECT_LE(choice.plan.excess_bytes / (limits.limit_bytes / 64),
                choices.front().plan.excess_bytes / (limits.limit_bytes / 64));
      const size_t count = choice.recomputed.size();
      kinds.push_back(count == 0 ? 0 : count == blocks.size() ? 2 : 1);
      EXPECT_TRUE(std::is_sorted(choice.recomputed.begin(), choice.recomputed.end(),
                                 [](const Block& one, const Block& other) { return one.call < other.call; }));
      uint64_t moved_bytes = 0;
      for (const Departure& departure : choice.plan.departures)
        moved_bytes += choice.record.storages[departure.storage].size_bytes;
      EXPECT_EQ(choice.moved_bytes, moved_bytes);
    }
    std::sort(kinds.begin(), kinds.end());
    EXPECT_EQ(std::unique(kinds.begin(), kinds.end()), kinds.end());
    several += choices.size() > 1 ? 1 : 0;
  }
  EXPECT_GT(several, 20u);
}

// Most of the memory is used late in backward: by gradients, which no block helps against.
TEST(StepChoice, ADemandThatPeaksInBackwardIsNotRecomputedInVain) {
  StepRecord record = transformer_step(1280, 4096);
  const uint64_t peak = peak_bytes(record);
  const size_t count = record.events.size();
  for (size_t event = count - 40; event < count; ++event) record.events[event].demand_bytes = 2 * peak;
  const StepLimits limits = at_limit(peak + peak / 50);
  const StepChoice choice = choose(record, limits);
  EXPECT_GT(choice.plan.excess_bytes, 0u);
  EXPECT_LE(choice.recomputed.size(), 3u) << "those whose backward comes then";
}

// The step with so many bytes of optimizer states in its demand.
StepRecord with_states(StepRecord record, uint64_t state_bytes) {
  for (StepEvent& event : record.events) event.demand_bytes += state_bytes;
  return record;
}

TEST(StepChoice, StatesLeaveOnlyWhereThatIsFaster) {
  const uint64_t state_bytes = 4'000'000'000;
  for (const StepRecord& activations : models()) {
    const StepRecord record = with_states(activations, state_bytes);
    for (const uint64_t percent : {85, 70, 50}) {
      for (const double steps_per_update : {1.0, 8.0}) {
        SCOPED_TRACE(testing::Message() << peak_bytes(record) << " at " << percent << " %, " << steps_per_update);
        StepLimits limits = limits_at(record, percent);
        limits.state_bytes = state_bytes;
        limits.steps_per_update = steps_per_update;
        const StepChoice choice = choose(record, limits);
        EXPECT_EQ(choice.plan.excess_bytes, 0u);
        EXPECT_LE(choice.state_bytes, state_bytes);
        EXPECT_DOUBLE_EQ(choice.state_seconds,
                         static_cast<double>(choice.state_bytes) / limits.out_bytes_per_second / steps_per_update);
        for (uint64_t part = 0; part <= 4; ++part) {
          const uint64_t away_bytes = state_bytes / 4 * part;
          const StepChoice other = choose(record, at_limit(limits.limit_bytes + away_bytes));
          if (other.plan.excess_bytes > 0) continue;
          const double seconds = static_cast<double>(away_bytes) / limits.out_bytes_per_second / steps_per_update;
          EXPECT_LE(choice.seconds, other.seconds + seconds + 1e-9) << part;
        }
      }
    }
  }
  // Of a narrow Transformer blocks are recomputed instead.
  const StepRecord narrow = with_states(transformer_step(1280, 12 * 1024), state_bytes);
  StepLimits limits = limits_at(narrow, 85);
  limits.state_bytes = state_bytes;
  EXPECT_EQ(choose(narrow, limits).state_bytes, 0u);
}

TEST(StepChoice, StatesLeaveWhereNothingElseMakesRoom) {
  const uint64_t state_bytes = 4'000'000'000;
  const StepRecord record = with_states(transformer_step(1280, 4096, 2), state_bytes);
  StepLimits limits = at_limit(peak_bytes(record) - state_bytes);
  limits.state_bytes = state_bytes;
  const StepChoice choice = choose(record, limits);
  EXPECT_GE(choice.state_bytes, state_bytes / 2);
  EXPECT_EQ(choice.plan.excess_bytes, 0u);
  // As far as they can.
  limits.limit_bytes /= 2;
  EXPECT_EQ(choose(record, limits).state_bytes, state_bytes);
}

TEST(StepChoice, AForcedOneRecomputesWhatIsDemandedWhateverThatCosts) {
  const StepRecord record = with_states(transformer_step(4096, 4096), uint64_t{1} << 30);
  StepLimits limits = limits_at(record, 70);
  limits.state_bytes = uint64_t{1} << 30;
  const std::vector<Block> blocks = find_blocks(record, {});
  const ForcedChoice forced{{record.calls[blocks[3].call].name, record.calls[blocks[5].call].name, 1},
                            uint64_t{1} << 20};
  const StepChoice choice = choose_forced(record, limits, blocks, forced);
  ASSERT_EQ(choice.recomputed.size(), 2u);
  EXPECT_EQ(choice.recomputed[0].call, blocks[3].call);
  EXPECT_EQ(choice.recomputed[1].call, blocks[5].call);
  EXPECT_EQ(choice.state_bytes, uint64_t{1} << 20);
  EXPECT_FALSE(choice.plan.departures.empty()) << "the rest leaves";
  EXPECT_EQ(choose_forced(record, limits, blocks, {{}, uint64_t{1} << 40}).state_bytes, limits.state_bytes);
}

TEST(StepChoice, WhereNothingLeavesMoreMayBeInUse) {
  const uint64_t state_bytes = uint64_t{1} << 30;
  const StepRecord record = with_states(transformer_step(4096, 4096), state_bytes);
  StepLimits limits = limits_at(record, 50);
  limits.state_bytes = state_bytes;
  limits.unmoved_bytes = peak_bytes(record) - state_bytes;
  const StepChoice unmoved = choose_forced(record, limits, {}, {{}, state_bytes});
  EXPECT_TRUE(unmoved.plan.evicts_nothing());
  EXPECT_FALSE(TriedChoice(unmoved).is_outdated(limits));
  --limits.unmoved_bytes;
  EXPECT_TRUE(TriedChoice(unmoved).is_outdated(limits));
  const StepChoice moved = choose_forced(record, limits, {}, {{}, state_bytes});
  EXPECT_EQ(planned_limit(limits, moved.plan), limits.limit_bytes);
  ASSERT_FALSE(moved.plan.departures.empty());
  // Nor where nothing can leave: that plan holds no limit.
  StepRecord staying = record;
  for (RecordedStorage& storage : staying.storages) storage.stays = true;
  const StepPlan none = make_plan(staying, limits);
  EXPECT_TRUE(none.departures.empty());
  EXPECT_EQ(planned_limit(limits, none), limits.limit_bytes);
}

TEST(StepChoice, WhatShallStayDoesNotLeave) {
  StepRecord record = transformer_step(1280, 12 * 1024);
  const StepLimits limits = limits_at(record, 80);
  const StepPlan before = make_plan(record, limits);
  ASSERT_FALSE(before.departures.empty());
  for (const Departure& departure : before.departures) record.storages[departure.storage].stays = true;
  const StepPlan after = make_plan(record, limits);
  EXPECT_FALSE(after.departures.empty()) << "others do";
  for (const Departure& departure : after.departures) EXPECT_FALSE(record.storages[departure.storage].stays);
}

TEST(StepChoice, AThousandBlocksTakeLessThanTheirStep) {
  const StepRecord record = transformer_step(1280, 1024, 1000);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(choose(record, limits_at(record, 50)).plan.excess_bytes, 0u);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(seconds.count(), 10) << "a thirtieth of it in a release build";
}

TEST(StepChoice, BlocksWithoutTimesOrWorthDoNoHarm) {
  for (const double seconds : {0.0, 1e-12, 1e6}) {
    const std::vector<BlockShape> shapes(30, {100'000'000, {200'000'000, 100'000'000}, seconds});
    const StepRecord record = block_step(shapes, 0, 0);
    const StepChoice choice = choose(record, limits_at(record, 60));
    EXPECT_EQ(choice.plan.excess_bytes, 0u);
    EXPECT_EQ(choice.recomputed.empty(), seconds > 1) << seconds;
  }
  StepRecord backwards = transformer_step(1280, 1024);
  for (StepEvent& event : backwards.events) event.seconds = -event.seconds;
  EXPECT_EQ(choose(backwards, limits_at(backwards, 60)).plan.excess_bytes, 0u);
}

}  // namespace
}  // namespace ebbtide::policy
