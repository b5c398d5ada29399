// Steps that differ from those before: they follow the plan by names, pass over what is missing, and ignore what is
// new.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <vector>

#include "model_steps.h"
#include "played_step.h"
#include "policy/lms/step_plan.h"
#include "step_replay.h"

namespace ebbtide::policy {
namespace {

// A step without what the predicate names. What follows holds as much less.
template <typename Predicate>
StepRecord without_storages(StepRecord record, const Predicate& is_left_out) {
  std::vector<StepEvent> events;
  uint64_t missing_bytes = 0;
  for (StepEvent event : record.events) {
    if (!is_of_call(event.kind) && is_left_out(event.index)) {
      if (event.kind == StepEventKind::kSaved) missing_bytes += record.storages[event.index].size_bytes;
      if (event.kind == StepEventKind::kDropped) missing_bytes -= record.storages[event.index].size_bytes;
      continue;
    }
    event.demand_bytes -= missing_bytes;
    events.push_back(event);
  }
  record.events = events;
  for (ModuleCall& call : record.calls) call.entered_at = call.returned_at = kNone;
  for (uint32_t event = 0; event < events.size(); ++event) {
    if (events[event].kind == StepEventKind::kEntered) record.calls[events[event].index].entered_at = event;
    if (events[event].kind == StepEventKind::kReturned) record.calls[events[event].index].returned_at = event;
  }
  return record;
}

TEST(StepDeviation, MissingStoragesArePassedOver) {
  const StepRecord record = transformer_step(1280, 4096, 8);
  const StepRules rules = copies_only(record, 60);
  std::mt19937_64 random(30);
  for (int round = 0; round < 100; ++round) {
    CheckedFollower checked;
    play(checked, record, rules);
    const PlayedStep whole = play(checked, record, rules);
    std::vector<bool> is_missing(record.storages.size());
    for (size_t storage = 1; storage < is_missing.size(); ++storage) is_missing[storage] = random() % 8 == 0;
    const StepRecord other = without_storages(record, [&](uint32_t storage) { return is_missing[storage]; });
    const PlayedStep run = play(checked, other, rules);
    EXPECT_TRUE(run.was_followed);
    EXPECT_EQ(checked.late_loads, 0u);
    EXPECT_EQ(checked.follower.plans_made(), 1u);
    // All that leaves in a whole step and is there leaves as well. That is enough, save for what the plan begins
    // between events that do not happen.
    std::vector<bool> leaves(record.storages.size());
    uint64_t expected_bytes = 0;
    for (const Departure& departure : whole.done.departures)
      if (!is_missing[departure.storage]) leaves[departure.storage] = true;
    for (uint32_t storage = 0; storage < leaves.size(); ++storage)
      expected_bytes += leaves[storage] ? record.storages[storage].size_bytes : 0;
    const auto more_bytes = static_cast<int64_t>(run.moved_bytes) - static_cast<int64_t>(expected_bytes);
    EXPECT_LE(std::abs(more_bytes), 3 * 8 * int64_t{1280 * 4096});
    EXPECT_EQ(play(checked, record, rules).moved_bytes, whole.moved_bytes) << "and the whole one is still known";
    if (HasFailure()) return;
  }
}

TEST(StepDeviation, NewStoragesAreIgnored) {
  std::mt19937_64 random(31);
  const StepRecord whole = transformer_step(1280, 4096, 8);
  for (int round = 0; round < 100; ++round) {
    // The first step has not had them.
    std::vector<bool> is_new(whole.storages.size());
    for (size_t storage = 1; storage < is_new.size(); ++storage) is_new[storage] = random() % 8 == 0;
    const StepRecord known = without_storages(whole, [&](uint32_t storage) { return is_new[storage]; });
    const StepRules rules = copies_only(whole, 60);
    CheckedFollower checked;
    play(checked, known, rules);
    const PlayedStep run = play(checked, whole, rules);
    EXPECT_TRUE(run.was_followed);
    EXPECT_GT(run.missing_bytes, 0u);
    EXPECT_LE(most(run.held), static_cast<int64_t>(rules.limits.limit_bytes)) << "they leave on demand";
    const PlayedStep next = play(checked, whole, rules);
    EXPECT_LT(next.missing_bytes, 2 * 8 * uint64_t{1280 * 4096}) << "others leave in their place";
    if (HasFailure()) return;
  }
}

TEST(StepDeviation, AStepOfWhichMostIsNewIsRecordedAnew) {
  const StepRecord full = transformer_step(1280, 4096, 12);
  StepRecord brief = transformer_step(1280, 4096, 4);
  brief.storages.front().key = full.storages.front().key;
  const StepRules rules = copies_only(full, 60);
  CheckedFollower checked;
  play(checked, brief, rules);
  EXPECT_GT(play(checked, full, rules).missing_bytes, 0u);
  EXPECT_EQ(checked.follower.plans_made(), 2u);
  EXPECT_EQ(play(checked, full, rules).missing_bytes, 0u);
}

// Of a model whose modules are others.
StepRecord of_model(StepRecord record, uint64_t model) {
  for (RecordedStorage& storage : record.storages) storage.key += model << 32;
  for (ModuleCall& call : record.calls) {
    call.key += model << 32;
    call.module += model << 32;
  }
  return record;
}

TEST(StepDeviation, AlternatingModelsAreKnownTogether) {
  CheckedFollower checked;
  std::vector<StepRecord> steps;
  for (uint64_t model = 0; model < 9; ++model)
    steps.push_back(of_model(transformer_step(128 << model, 1024, 8), model));
  const auto run = [&](size_t model) { return play(checked, steps[model], mixed(steps[model], 70)); };
  for (int round = 0; round < 8; ++round) {
    for (size_t model = 0; model < 8; ++model) {
      const PlayedStep step = run(model);
      EXPECT_EQ(step.was_followed, round > 0);
      EXPECT_EQ(step.missing_bytes == 0, round > 0);
    }
  }
  // A ninth one takes the place of the one that was followed longest ago.
  EXPECT_TRUE(run(0).was_followed);
  EXPECT_FALSE(run(8).was_followed);
  EXPECT_TRUE(run(0).was_followed);
  EXPECT_FALSE(run(1).was_followed);
}

// Sizes of experts vary from step to step, and their sum does not. The rest stays as it is.
StepRecord with_experts(StepRecord record, std::mt19937_64& random) {
  std::vector<uint64_t> sizes;
  for (const RecordedStorage& storage : record.storages) sizes.push_back(storage.size_bytes);
  for (size_t storage = 2; storage + 1 < sizes.size(); storage += 4) {
    const uint64_t moved = std::min(sizes[storage], sizes[storage + 1]) * (random() % 61) / 200;
    const bool is_up = random() % 2 == 0;
    sizes[storage] += is_up ? moved : -moved;
    sizes[storage + 1] -= is_up ? moved : -moved;
  }
  int64_t change = 0;
  for (StepEvent& event : record.events) {
    if (!is_of_call(event.kind) && (event.kind == StepEventKind::kSaved || event.kind == StepEventKind::kDropped)) {
      const auto more = static_cast<int64_t>(sizes[event.index] - record.storages[event.index].size_bytes);
      change += event.kind == StepEventKind::kSaved ? more : -more;
    }
    event.demand_bytes = static_cast<uint64_t>(static_cast<int64_t>(event.demand_bytes) + change);
  }
  for (size_t storage = 0; storage < sizes.size(); ++storage) record.storages[storage].size_bytes = sizes[storage];
  return record;
}

TEST(StepDeviation, StepsOfOtherSizesFollowThePlan) {
  std::mt19937_64 random(32);
  for (const uint64_t percent : {85, 70, 50}) {
    for (const bool may_recompute : {false, true}) {
      SCOPED_TRACE(testing::Message() << percent << " %, " << may_recompute);
      const StepRecord record = transformer_step(1280, 12 * 1024, 16);
      StepRules rules = mixed(record, percent);
      rules.may_recompute = may_recompute;
      CheckedFollower checked;
      play(checked, with_experts(record, random), rules);
      uint64_t moved_bytes = 0, least_bytes = 0;
      size_t short_steps = 0;
      for (int step = 0; step < 40; ++step) {
        const StepRecord other = with_experts(record, random);
        const PlayedStep run = play(checked, other, rules);
        EXPECT_TRUE(run.was_followed);
        if (step < 10) continue;
        short_steps += run.missing_bytes > 0 ? 1 : 0;
        moved_bytes += run.moved_bytes;
        least_bytes += on_demand_bytes(run.happened, rules.limits.limit_bytes, true);
      }
      EXPECT_LE(short_steps, 3u);
      EXPECT_LE(checked.follower.plans_made(), 20u);
      // The least volume is that of a step whose sizes are known before. What recomputes shows too few samples for
      // demands to fall.
      const uint64_t spare_bytes = may_recompute ? 30 * rules.limits.limit_bytes / 16 : 0;
      EXPECT_LE(moved_bytes, least_bytes + least_bytes / 10 + spare_bytes);
    }
  }
}

// A model that is made anew has the names of the one before.
TEST(StepDeviation, AShorterProgramOfTheSameNamesLosesThePlanOfTheLongerOne) {
  const StepRecord long_step = transformer_step(1280, 12 * 1024, 16), short_step = transformer_step(1280, 12 * 1024, 6);
  for (const bool may_recompute : {false, true}) {
    const StepRules rules = may_recompute ? mixed(long_step, 50) : copies_only(long_step, 50);
    ASSERT_LT(peak_bytes(short_step), rules.limits.limit_bytes);
    CheckedFollower checked;
    for (int step = 0; step < 10; ++step) play(checked, long_step, rules);
    ASSERT_EQ(checked.follower.latest_choice()->recomputed.empty(), !may_recompute);
    for (int step = 0; step < 6; ++step) play(checked, short_step, rules);
    const PlayedStep run = play(checked, short_step, rules);
    EXPECT_EQ(run.recomputed, 0u);
    EXPECT_EQ(run.moved_bytes, 0u);
  }
}

TEST(StepDeviation, StepsThatLeaveOutAThirdKeepTheirPlan) {
  std::mt19937_64 random(5);
  const StepRecord whole = transformer_step(1280, 4096, 16);
  const StepRules rules = copies_only(whole, 60);
  CheckedFollower checked;
  for (int step = 0; step < 30; ++step) {
    std::vector<bool> is_missing(whole.storages.size());
    for (size_t storage = 1; storage < is_missing.size(); ++storage) is_missing[storage] = random() % 3 == 0;
    const StepRecord some = without_storages(whole, [&](uint32_t storage) { return is_missing[storage]; });
    EXPECT_EQ(play(checked, some, rules).was_followed, step > 0) << step;
  }
}

// A batch of other length: all sizes and times are a part.
StepRecord padded(StepRecord record, uint64_t percent) {
  for (RecordedStorage& storage : record.storages) storage.size_bytes = storage.size_bytes / 100 * percent;
  for (StepEvent& event : record.events) {
    event.demand_bytes = event.demand_bytes / 100 * percent;
    event.seconds *= static_cast<double>(percent) / 100;
  }
  for (ModuleCall& call : record.calls) {
    call.input_bytes = call.input_bytes / 100 * percent;
    call.saved_input_bytes = call.saved_input_bytes / 100 * percent;
  }
  return record;
}

TEST(StepDeviation, PaddedBatchesHoldTheLimitWithoutEndlessPlans) {
  std::mt19937_64 random(33);
  const StepRecord record = transformer_step(1280, 12 * 1024, 16);
  for (const bool may_recompute : {false, true}) {
    StepRules rules = mixed(record, 60);
    rules.may_recompute = may_recompute;
    CheckedFollower checked;
    size_t short_steps = 0;
    uint64_t plans_before = 0;
    double direct = 0, taken = 0;
    for (int step = 0; step < 120; ++step) {
      const StepRecord batch = padded(record, 40 + random() % 61);
      const PlayedStep run = play(checked, batch, rules);
      EXPECT_LE(most(run.held), static_cast<int64_t>(rules.limits.limit_bytes));
      if (step == 20) plans_before = checked.follower.plans_made();
      if (step < 20) continue;
      short_steps += run.missing_bytes > 0 ? 1 : 0;
      const std::vector<Block> blocks = may_recompute ? find_blocks(batch, {}) : std::vector<Block>();
      direct += choose_steps(batch, rules.limits, blocks).front().seconds;
      taken += replay(run.happened, run.done).seconds;
    }
    EXPECT_LE(short_steps, 25u);
    EXPECT_LE(checked.follower.plans_made() - plans_before, 60u);
    EXPECT_LE(taken, 1.2 * direct) << "chosen for each batch alone, which nobody knows before";
  }
}

TEST(StepDeviation, AStepThatRecomputesIsNotTakenForAWholeOne) {
  const StepRecord record = transformer_step(1280, 12 * 1024, 16);
  const StepRules rules = mixed(record, 50);
  CheckedFollower checked;
  play(checked, record, rules);
  for (int step = 0; step < 4; ++step) play(checked, record, rules);
  EXPECT_GT(play(checked, record, rules).recomputed, 4u);
  const uint64_t plans_before = checked.follower.plans_made();
  for (int step = 0; step < 4; ++step) {
    const PlayedStep smaller = play(checked, padded(record, 70), rules);
    EXPECT_TRUE(smaller.was_followed);
    EXPECT_GT(smaller.recomputed, 4u);
    EXPECT_EQ(smaller.missing_bytes, 0u);
  }
  EXPECT_GT(play(checked, record, rules).recomputed, 4u);
  EXPECT_LE(checked.follower.plans_made(), plans_before + 4) << "for other demands alone";
}

}  // namespace
}  // namespace ebbtide::policy
