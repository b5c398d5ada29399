// What later steps change in the plans for a known one: demands, times, and which choice stays.
#include "policy/lms/known_step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "model_steps.h"
#include "played_step.h"
#include "step_replay.h"

namespace ebbtide::policy {
namespace {

constexpr uint64_t kTokens = 4096;

// --- Anchors ---

TEST(StepLearning, AnchorsTellEventsApart) {
  const StepRecord record = transformer_step(1280, kTokens);
  const std::vector<uint64_t> anchors = anchors_of(record);
  ASSERT_EQ(anchors.size(), record.events.size());
  std::vector<uint64_t> named;
  for (size_t event = 0; event < anchors.size(); ++event) {
    const StepEventKind kind = record.events[event].kind;
    EXPECT_EQ(anchors[event] == 0, kind == StepEventKind::kFree || kind == StepEventKind::kDropped);
    if (anchors[event] != 0) named.push_back(anchors[event]);
  }
  std::sort(named.begin(), named.end());
  EXPECT_EQ(std::unique(named.begin(), named.end()), named.end());
  EXPECT_NE(anchor(StepEventKind::kWanted, 1, 0), anchor(StepEventKind::kWanted, 1, 1));
}

// --- Demands ---

TEST(StepLearning, DemandsThatFallMoveLess) {
  const StepRecord record = with_base(transformer_step(1280, kTokens), 2'000'000'000);
  const auto less = static_cast<int64_t>(part_of_peak(record, 15));
  for (const StepRules& rules : {copies_only(record, 70), mixed(record, 70)}) {
    CheckedFollower checked;
    for (int step = 0; step < 6; ++step) play(checked, record, rules);
    const StepRecord smaller = with_base(record, -less);
    uint64_t moved_bytes = play(checked, record, rules).moved_bytes;
    for (int step = 0; step < 5; ++step) moved_bytes = play(checked, smaller, rules).moved_bytes;
    const PlayedStep last = play(checked, smaller, rules);
    const uint64_t least_bytes = on_demand_bytes(last.happened, rules.limits.limit_bytes, true);
    EXPECT_LE(last.moved_bytes, least_bytes + least_bytes / 10 + rules.limits.limit_bytes / 32) << moved_bytes;
    EXPECT_EQ(last.missing_bytes, 0u);
    // And when it grows again, one step is short.
    EXPECT_GT(play(checked, record, rules).missing_bytes, 0u);
    EXPECT_EQ(play(checked, record, rules).missing_bytes, 0u);
  }
}

TEST(StepLearning, TheHighestOfTheLastDemandsCounts) {
  const StepRecord record = transformer_step(1280, kTokens);
  const StepRules rules = copies_only(record, 70);
  CheckedFollower checked;
  const StepRecord higher = with_base(record, static_cast<int64_t>(part_of_peak(record, 5)));
  play(checked, record, rules);
  size_t short_steps = 0;
  for (int step = 0; step < 40; ++step)
    short_steps += play(checked, step % 3 == 0 ? higher : record, rules).missing_bytes > 0 ? 1 : 0;
  EXPECT_EQ(short_steps, 1u);
}

TEST(StepLearning, ALargeGrowthAsksForAnotherChoice) {
  const StepRecord record = transformer_step(1280, kTokens);
  const StepRules rules = mixed(record, 85);
  CheckedFollower checked;
  size_t recomputed = 0;
  for (int step = 0; step < 10; ++step) recomputed = play(checked, record, rules).recomputed;
  EXPECT_LE(recomputed, 4u);
  const StepRecord higher = with_base(record, static_cast<int64_t>(part_of_peak(record, 30)));
  for (int step = 0; step < 10; ++step) recomputed = play(checked, higher, rules).recomputed;
  EXPECT_GT(recomputed, 5u);
  const PlayedStep last = play(checked, higher, rules);
  EXPECT_EQ(last.missing_bytes, 0u);
  // As good as one that was recorded so.
  const double direct = choose_steps(higher, rules.limits, find_blocks(higher, {})).front().seconds;
  EXPECT_LE(replay(last.happened, last.done).seconds, 1.05 * direct);
}

// Such as the states that the first step of an optimizer makes.
TEST(StepLearning, WhatTheFirstStepMadeIsInThePlanForTheSecondOne) {
  const StepRecord record = transformer_step(1280, kTokens);
  const auto made_bytes = static_cast<int64_t>(part_of_peak(record, 30));
  StepRules rules = mixed(record, 85);
  CheckedFollower checked;
  rules.demand_bytes = record.events.front().demand_bytes + static_cast<uint64_t>(made_bytes);
  play(checked, record, rules);
  const StepRecord later = with_base(record, made_bytes);
  EXPECT_EQ(play(checked, later, rules).missing_bytes, 0u);
}

TEST(StepLearning, StatesThatPlansHaveOnTheHostAreRoom) {
  const StepRecord record = transformer_step(1280, kTokens);
  StepRules rules = copies_only(record, 70);
  rules.limits.state_bytes = part_of_peak(record, 64);
  rules.limits.steps_per_update = 1e6;  // they cost nothing
  CheckedFollower checked;
  play(checked, record, rules);
  EXPECT_GE(checked.follower.state_bytes(), part_of_peak(record, 30) - 1);
  EXPECT_EQ(checked.follower.latest_choice()->plan.departures.size(), 0u);
  checked.follower.forget_state_bytes();
  EXPECT_EQ(checked.follower.state_bytes(), 0u);
  play(checked, record, rules);
  EXPECT_GE(checked.follower.state_bytes(), part_of_peak(record, 30) - 1) << "a step that followed the plan";
  // Another amount asks for another choice.
  rules.limits.state_bytes = 0;
  play(checked, record, rules);
  EXPECT_EQ(checked.follower.state_bytes(), 0u);
  EXPECT_GT(checked.follower.latest_choice()->plan.departures.size(), 0u);
}

// --- Times and choices ---

// And if further steps of it are slower, it gives way.
TEST(StepLearning, EachChoiceIsMeasuredInTwoStepsAndTheFastestStays) {
  const StepRecord record = transformer_step(1280, 12 * 1024);
  const StepRules rules = mixed(record, 50);
  const size_t all = find_blocks(record, {}).size();
  const std::vector<std::pair<std::vector<double>, std::vector<bool>>> cases = {
      {{0.1, 0.1, 0.11, 0.11, 0.1, 0.1, 0.1}, {false, false, true, true, false, false, false}},
      {{0.11, 0.11, 0.1, 0.1, 0.1, 0.1, 0.1}, {false, false, true, true, true, true, true}},
      {{0.1, 0.1, 0.11, 0.11, 0.14, 0.1, 0.1}, {false, false, true, true, false, false, false}},
      {{0.1, 0.1, 0.11, 0.11, 0.14, 0.14, 0.11, 0.11, 0.11},
       {false, false, true, true, false, false, true, true, true}}};
  for (const auto& [seconds, recompute_all] : cases) {
    CheckedFollower checked;
    play(checked, record, rules);
    const size_t some = checked.follower.latest_choice()->recomputed.size();
    ASSERT_TRUE(some > 0 && some < all);
    for (size_t step = 0; step < seconds.size(); ++step)
      EXPECT_EQ(play(checked, record, rules, {.measured_seconds = seconds[step]}).recomputed,
                recompute_all[step] ? all : some)
          << step;
    checked.saved({.key = record.storages[0].key, .size_bytes = record.storages[0].size_bytes}, 0, 0);
    EXPECT_FALSE(checked.follower.wants_times());
  }
}

TEST(StepLearning, WhereStepsWaitForOtherRanksTheBestForecastStays) {
  const StepRecord record = transformer_step(1280, 12 * 1024);
  StepRules rules = mixed(record, 50);
  rules.are_compared = false;
  CheckedFollower checked;
  play(checked, record, rules);
  const size_t some = checked.follower.latest_choice()->recomputed.size();
  for (int step = 0; step < 8; ++step)
    EXPECT_EQ(play(checked, record, rules, {.measured_seconds = 0.2}).recomputed, some);
  checked.saved({.key = record.storages[0].key, .size_bytes = record.storages[0].size_bytes}, 0, 0);
  EXPECT_FALSE(checked.follower.wants_times());
}

TEST(StepLearning, ADisturbedStepTeachesNothing) {
  const StepRecord record = transformer_step(1280, 12 * 1024);
  StepRules rules = mixed(record, 50), disturbed = rules;
  disturbed.was_disturbed = true;
  const size_t all = find_blocks(record, {}).size();
  CheckedFollower checked;
  play(checked, record, rules);
  const size_t some = checked.follower.latest_choice()->recomputed.size();
  // Neither a short time, nor other demands, nor a shortage.
  const StepRecord other = with_base(record, static_cast<int64_t>(part_of_peak(record, 40)));
  for (int step = 0; step < 3; ++step)
    EXPECT_EQ(play(checked, other, disturbed, {.measured_seconds = 0.001}).recomputed, some);
  EXPECT_EQ(checked.follower.plans_made(), 1u);
  EXPECT_EQ(checked.follower.margin_bytes(), 0u);
  for (int step = 0; step < 2; ++step)
    EXPECT_EQ(play(checked, record, rules, {.measured_seconds = 0.11}).recomputed, some);
  for (int step = 0; step < 2; ++step)
    EXPECT_EQ(play(checked, record, rules, {.measured_seconds = 0.1}).recomputed, all);
  EXPECT_EQ(play(checked, record, rules).recomputed, all);
}

TEST(StepLearning, AFirstStepThatIsDisturbedIsNotRecorded) {
  const StepRecord record = transformer_step(1280, 12 * 1024);
  StepRules rules = mixed(record, 50), disturbed = rules;
  disturbed.was_disturbed = true;
  CheckedFollower checked;
  play(checked, with_base(record, static_cast<int64_t>(part_of_peak(record, 40))), disturbed);
  EXPECT_EQ(checked.follower.plans_made(), 0u);
  play(checked, record, rules);
  EXPECT_EQ(checked.follower.plans_made(), 1u);
}

TEST(StepLearning, TheTimesOfASlowFirstStepAreCorrected) {
  // Kernels are loaded and chosen in the first step: it takes ten times as long, so that copies seem to cost nothing.
  for (const uint64_t percent : {85, 70, 50}) {
    const StepRecord record = transformer_step(1280, 12 * 1024);
    const StepRules rules = mixed(record, percent);
    CheckedFollower checked;
    play(checked, record, rules, {.speed = 0.1});
    EXPECT_TRUE(checked.follower.latest_choice()->recomputed.empty());
    PlayedStep last;
    for (int step = 0; step < 12; ++step) last = play(checked, record, rules);
    const double direct = choose_steps(record, rules.limits, find_blocks(record, {})).front().seconds;
    EXPECT_LE(replay(last.happened, last.done).seconds, 1.03 * direct) << percent;
  }
}

TEST(StepLearning, TheTimesOfASlowFirstStepAreCorrectedWhileItRecomputes) {
  // It takes twice as long: blocks are recomputed, but fewer than it is worth.
  const StepRecord record = transformer_step(1280, 12 * 1024);
  const StepRules rules = mixed(record, 50);
  CheckedFollower checked;
  play(checked, record, rules, {.speed = 0.3});
  const size_t slow = checked.follower.latest_choice()->recomputed.size();
  PlayedStep last;
  for (int step = 0; step < 12; ++step) last = play(checked, record, rules);
  const std::vector<StepChoice> direct = choose_steps(record, rules.limits, find_blocks(record, {}));
  EXPECT_NE(slow, direct.front().recomputed.size());
  EXPECT_LE(replay(last.happened, last.done).seconds, 1.03 * direct.front().seconds);
}

TEST(StepLearning, SmallChangesOfTheLimitAddUp) {
  const StepRecord record = transformer_step(1280, 12 * 1024);
  CheckedFollower checked;
  size_t recomputed = 0;
  for (uint64_t percent = 95; percent >= 45; --percent)
    recomputed = play(checked, record, mixed(record, percent)).recomputed;
  for (int step = 0; step < 4; ++step) recomputed = play(checked, record, mixed(record, 45)).recomputed;
  EXPECT_GT(recomputed, 5u);
}

TEST(StepLearning, RulesAreHeldFromTheNextStepOn) {
  const StepRecord record = transformer_step(1280, 12 * 1024);
  StepRules rules = mixed(record, 50);
  CheckedFollower checked;
  for (int step = 0; step < 4; ++step) play(checked, record, rules);
  EXPECT_GT(play(checked, record, rules).recomputed, 5u);
  for (const Block& block : std::vector<Block>(checked.follower.latest_choice()->recomputed))
    rules.forbidden.insert(record.calls[block.call].module);
  play(checked, record, rules);
  for (const Block& block : checked.follower.latest_choice()->recomputed)
    EXPECT_FALSE(rules.forbidden.contains(record.calls[block.call].module));
  rules.may_recompute = false;
  play(checked, record, rules);
  EXPECT_EQ(play(checked, record, rules).recomputed, 0u);
  rules = mixed(record, 50);
  play(checked, record, rules);
  EXPECT_GT(play(checked, record, rules).recomputed, 5u);
}

TEST(StepLearning, AllThatMayBeRecomputedIsKnownBeforeItIs) {
  const StepRecord record = transformer_step(1280, 12 * 1024);
  StepRules rules = mixed(record, 85);
  const auto candidates = [&] { return KnownStep(record, rules).candidates(); };
  const KnownStep known(record, rules);
  const std::vector<uint64_t> found = known.candidates();
  EXPECT_EQ(found.size(), find_blocks(record, {}).size());
  for (const TriedChoice& tried : known.choices())
    for (const Block& block : tried.choice().recomputed)
      EXPECT_NE(std::find(found.begin(), found.end(), record.calls[block.call].module), found.end());
  rules.forbidden.insert(found.front());
  const std::vector<uint64_t> others = candidates();
  EXPECT_EQ(std::find(others.begin(), others.end(), found.front()), others.end());
  rules = mixed(record, 110);
  EXPECT_TRUE(candidates().empty()) << "nothing has to be";
}

TEST(StepLearning, APlanMayNameCallsInsideOthersThatMightBeBlocks) {
  StepRecord record = transformer_step(1280, 12 * 1024);
  StepRules rules = mixed(record, 85);
  const std::vector<Block> outer = find_blocks(record, {});
  for (const Block& block : outer) {  // a module in each that saves all of it
    rules.forbidden.insert(record.calls[block.call].module);
    ModuleCall inner = record.calls[block.call];
    inner.parent = block.call;
    for (uint64_t* const number : {&inner.module, &inner.name, &inner.key}) *number += 5000;
    for (RecordedStorage& storage : record.storages)
      if (storage.call == block.call) storage.call = static_cast<uint32_t>(record.calls.size());
    record.calls.push_back(inner);
  }
  ForcedChoice plan;
  std::vector<uint64_t> modules;
  for (const Block& block : find_blocks(record, rules.forbidden)) {
    plan.recomputed.insert(record.calls[block.call].name);
    modules.push_back(record.calls[block.call].module);
  }
  ASSERT_EQ(modules.size(), outer.size());
  ASSERT_GT(modules.front(), 5000u);
  rules.forbidden.clear();  // nobody has looked at them yet
  rules.forced = std::make_shared<const ForcedChoice>(plan);
  EXPECT_EQ(KnownStep(record, rules).current().choice().recomputed.size(), modules.size());
  EXPECT_EQ(KnownStep(record, rules).candidates(), modules);
  rules.forced = std::make_shared<const ForcedChoice>();
  EXPECT_TRUE(KnownStep(record, rules).candidates().empty()) << "it asks for none";
}

// What recomputes is a call of the record from before.
TEST(StepLearning, AnotherProgramWithTheSameFirstStorageIsChosenFor) {
  const StepRecord record = transformer_step(1280, 12 * 1024);
  StepRules rules = mixed(record, 60);
  rules.limits.has_pages = true;
  rules.forbidden = {999999};
  CheckedFollower checked;
  for (int step = 0; step < 4; ++step) play(checked, record, rules);
  ASSERT_FALSE(checked.follower.latest_choice()->recomputed.empty());
  StepRecord other = transformer_step(1280, 12 * 1024, 2);
  for (ModuleCall& call : other.calls) call.key += 7777;
  for (size_t storage = 1; storage < other.storages.size(); ++storage) other.storages[storage].key += 7777;
  play(checked, other, rules);
  EXPECT_EQ(checked.follower.latest()->whole().calls.size(), other.calls.size());
  for (const Block& block : checked.follower.latest_choice()->recomputed) EXPECT_LT(block.call, other.calls.size());
}

TEST(StepLearning, WhatOtherChoicesRecomputeIsAmongTheCandidates) {
  const StepRecord record = transformer_step(8192, 12 * 1024);
  const KnownStep known(record, mixed(record, 85));
  ASSERT_TRUE(known.current().choice().recomputed.empty());
  ASSERT_GT(known.choices().size(), 1u);
  EXPECT_FALSE(known.candidates().empty());
}

TEST(StepLearning, AStepThatHasBegunIsChosenForAgain) {
  const StepRecord record = transformer_step(1280, 12 * 1024);
  StepRules rules = mixed(record, 50);
  CheckedFollower checked;
  play(checked, record, rules);
  const uint64_t forbidden = checked.follower.latest_choice()->recomputed.front().call;
  const uint64_t key = record.calls[forbidden].key;
  checked.entered(record.calls[0], kNone, record.events[0].demand_bytes, 0);
  EXPECT_TRUE(checked.follower.is_recomputed(key));
  rules.forbidden.insert(record.calls[forbidden].module);
  checked.follower.choose_again(rules);
  EXPECT_EQ(checked.follower.plans_made(), 2u);
  EXPECT_TRUE(checked.follower.is_following());
  EXPECT_FALSE(checked.follower.is_recomputed(key));
  // Once something was saved, the choice stays.
  checked.saved({.key = record.storages[0].key, .size_bytes = record.storages[0].size_bytes}, 0, 0);
  checked.follower.choose_again(rules);
  EXPECT_EQ(checked.follower.plans_made(), 2u);
}

TEST(StepLearning, AStepWithRecomputedBlocksIsFollowedToItsEnd) {
  for (const uint64_t percent : {85, 70, 50, 35}) {
    const StepRecord record = transformer_step(1280, 12 * 1024);
    const StepRules rules = mixed(record, percent);
    CheckedFollower checked;
    play(checked, record, rules);
    for (int step = 0; step < 5; ++step) {
      const StepChoice planned = *checked.follower.latest_choice();
      const PlayedStep run = play(checked, record, rules);
      EXPECT_EQ(run.recomputed, planned.recomputed.size());
      EXPECT_EQ(run.missing_bytes, 0u);
      EXPECT_EQ(run.moved_bytes, planned.moved_bytes);
      EXPECT_LE(replay(run.happened, run.done).seconds, 1.03 * planned.seconds) << percent;
    }
    EXPECT_EQ(checked.late_loads, 0u);
    EXPECT_LE(checked.follower.plans_made(), 3u);
  }
}

// --- Volume ---

TEST(StepLearning, TheVolumeIsNearTheLeast) {
  std::mt19937_64 random(61);
  double moved = 0, least = 0;
  for (int round = 0; round < 60; ++round) {
    std::vector<BlockShape> shapes(4 + random() % 20);
    for (BlockShape& shape : shapes) {
      shape = {random() % 50'000'000, {}, 1e-3 * static_cast<double>(1 + random() % 9)};
      for (size_t part = 1 + random() % 8; part-- > 0;) shape.parts_bytes.push_back(1 + random() % 50'000'000);
    }
    const StepRecord record = block_step(shapes, random() % 200'000'000, random() % 50'000'000);
    const uint64_t percent = 50 + random() % 45;
    for (const StepRules& rules : {copies_only(record, percent), mixed(record, percent)}) {
      CheckedFollower checked;
      PlayedStep last;
      for (int step = 0; step < 8; ++step) last = play(checked, record, rules);
      if (on_demand_bytes(record, rules.limits.limit_bytes, true) == 0) continue;
      moved += static_cast<double>(last.moved_bytes);
      least += static_cast<double>(on_demand_bytes(last.happened, rules.limits.limit_bytes, true));
      EXPECT_EQ(last.missing_bytes, 0u);
    }
  }
  EXPECT_GT(least, 0);
  EXPECT_LE(moved, 1.10 * least);
}

}  // namespace
}  // namespace ebbtide::policy
