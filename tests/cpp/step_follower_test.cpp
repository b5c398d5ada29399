// Steps that are recorded and followed: equal ones, others, and sequences that no training makes.
#include "policy/lms/step_follower.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "played_step.h"
#include "policy/lms/step_plan.h"
#include "step_replay.h"

namespace ebbtide::policy {
namespace {

constexpr Manner kPlanned{.evicts_on_demand = false};  // nothing but the plan moves anything

TEST(StepFollower, AnEqualStepFollowsThePlan) {
  for (const StepRecord& record : {llama_step(), resnet_step()}) {
    for (const uint64_t percent : {80, 60, 40}) {
      const StepRules rules = mixed(record, percent);
      CheckedFollower checked;
      const PlayedStep first = play(checked, record, rules, kPlanned);
      EXPECT_TRUE(first.done.departures.empty());
      EXPECT_FALSE(first.was_followed);
      const double planned = replay(record, make_plan(record, rules.limits)).seconds;
      for (int step = 0; step < 3; ++step) {
        const PlayedStep next = play(checked, record, rules);
        EXPECT_TRUE(next.was_followed);
        EXPECT_EQ(next.missing_bytes, 0u);
        expect_same_departures(next.done, make_plan(as_recorded(record), rules.limits));
        EXPECT_LE(planned, 1.005 * replay(record, next.done).seconds);
        EXPECT_LE(replay(record, next.done).seconds, 1.02 * planned) << "it knows less of the time between two turns";
      }
      EXPECT_EQ(checked.follower.plans_made(), 1u);
      EXPECT_EQ(checked.late_loads, 0u);
    }
  }
}

TEST(StepFollower, NothingHappensWhereEverythingFits) {
  CheckedFollower checked;
  for (int step = 0; step < 5; ++step) {
    const PlayedStep run = play(checked, small_step(), rules_at({1000, 1000, 1000}));
    EXPECT_TRUE(run.done.departures.empty());
    EXPECT_EQ(run.was_followed, step > 0);
  }
  EXPECT_EQ(checked.follower.plans_made(), 1u);
  EXPECT_EQ(checked.follower.latest_choice()->plan.excess_bytes, 0u);
  checked.saved({.key = 1, .size_bytes = 10}, 15, 0);
  EXPECT_FALSE(checked.follower.wants_times()) << "once a step is measured, times are of no use";
}

TEST(StepFollower, RandomStepsHoldTheLimit) {
  std::mt19937_64 random(21);
  size_t departures = 0;
  for (int round = 0; round < 300; ++round) {
    StepRecord record = random_step(random, 10 + random() % 200);
    use_typical_times(record);
    const StepRules rules = rules_at({part_of_peak(record, 30 + random() % 70), 1000, 1000});
    CheckedFollower checked;
    play(checked, record, rules, kPlanned);
    // The follower cannot see that a demand went down at a drop: it never plans with too little.
    const int64_t bound = static_cast<int64_t>(rules.limits.limit_bytes + make_plan(record, rules.limits).excess_bytes);
    for (int step = 0; step < 2; ++step) {
      const PlayedStep run = play(checked, record, rules, kPlanned);
      EXPECT_TRUE(run.was_followed);
      EXPECT_LE(most(run.held), bound);
      expect_same_departures(run.done, make_plan(as_recorded(record), rules.limits));
      departures += run.done.departures.size();
    }
    EXPECT_EQ(checked.follower.plans_made(), 1u);
    EXPECT_EQ(checked.late_loads, 0u);
    if (HasFailure()) return;
  }
  EXPECT_GT(departures, 1000u);
}

TEST(StepFollower, TheTimeOfAFreeDoesNotMatter) {
  std::mt19937_64 random(22);
  const StepRecord record = small_step();
  for (int round = 0; round < 200; ++round) {
    CheckedFollower checked;
    play(checked, record, rules_at(kSmallLimits), kPlanned);
    StepRecord other = record;
    for (int move = 0; move < 10; ++move) {
      // Never before its save, and never after its use.
      const size_t at = random() % (other.events.size() - 1);
      StepEvent &one = other.events[at], &next = other.events[at + 1];
      const bool is_free = one.kind == StepEventKind::kFree || next.kind == StepEventKind::kFree;
      if (!is_free || one.index == next.index) continue;
      std::swap(one, next);
      std::swap(one.seconds, next.seconds);
    }
    // Some are never seen to be free.
    std::erase_if(other.events,
                  [&](const StepEvent& event) { return event.kind == StepEventKind::kFree && random() % 8 == 0; });
    EXPECT_TRUE(play(checked, other, rules_at(kSmallLimits), kPlanned).was_followed);
    EXPECT_EQ(checked.late_loads, 0u);
    EXPECT_EQ(checked.follower.plans_made(), 1u);
  }
}

TEST(StepFollower, StoragesThatAreFreeLateLeaveLate) {
  const StepRecord record = small_step();
  CheckedFollower checked;
  play(checked, record, rules_at(kSmallLimits), kPlanned);
  const PlayedStep planned = play(checked, record, rules_at(kSmallLimits), kPlanned);
  StepRecord other = record;
  // The first storage becomes free after the last one was saved.
  std::erase_if(other.events,
                [](const StepEvent& event) { return event.kind == StepEventKind::kFree && event.index == 0; });
  const auto first_use = std::find_if(other.events.begin(), other.events.end(),
                                      [](const StepEvent& event) { return event.kind == StepEventKind::kWanted; });
  const auto at = static_cast<uint32_t>(first_use - other.events.begin());
  other.events.insert(first_use, {StepEventKind::kFree, 0, (first_use - 1)->demand_bytes, (first_use - 1)->seconds});
  const PlayedStep late = play(checked, other, rules_at(kSmallLimits), kPlanned);
  EXPECT_EQ(late.done.departures.size(), planned.done.departures.size());
  EXPECT_EQ(late.done.departures.back().storage, 0u);
  EXPECT_EQ(late.done.departures.back().copy_at, at);
  EXPECT_EQ(late.done.departures.back().release_at, at);
}

TEST(StepFollower, ADropOfAnAbsentStorageMakesNoOtherLeave) {
  StepWriter step(0);
  const uint32_t unused = step.save(10);
  step.set_free(unused);
  const uint32_t used = step.save(10);
  step.set_free(used);
  const uint32_t last = step.save(10);
  step.drop(unused);
  step.want(last);
  step.want(used);
  const StepRules rules = rules_at({20, 1000, 1000});
  CheckedFollower checked;
  play(checked, step.record(), rules, kPlanned);
  const PlayedStep run = play(checked, step.record(), rules, kPlanned);
  ASSERT_EQ(run.done.departures.size(), 1u);
  EXPECT_EQ(run.done.departures[0].storage, unused);
}

TEST(StepFollower, ADemandThatStillFitsMakesNoOtherPlan) {
  StepRecord record = small_step();
  const StepRules rules = rules_at({100, 1000, 1000});
  CheckedFollower checked;
  play(checked, record, rules);
  for (StepEvent& event : record.events) event.demand_bytes += 2;
  play(checked, record, rules);
  EXPECT_EQ(checked.follower.plans_made(), 1u);
  for (StepEvent& event : record.events) event.demand_bytes += 13;
  EXPECT_GT(play(checked, record, rules).missing_bytes, 0u);
  EXPECT_EQ(checked.follower.plans_made(), 2u);
  EXPECT_EQ(play(checked, record, rules).missing_bytes, 0u);
}

TEST(StepFollower, AnotherLimitMakesAnotherPlan) {
  const StepRecord record = small_step();
  CheckedFollower checked;
  play(checked, record, rules_at(kSmallLimits));
  play(checked, record, rules_at({48, 1000, 1000}));
  EXPECT_EQ(checked.follower.plans_made(), 2u);
  EXPECT_LE(most(play(checked, record, rules_at({1000, 1000, 1000}), kPlanned).held), 48);
  EXPECT_TRUE(play(checked, record, rules_at({1000, 1000, 1000}), kPlanned).done.departures.empty());
  EXPECT_EQ(checked.follower.plans_made(), 3u);
  play(checked, record, rules_at({1, 1000, 1000}));
  EXPECT_GT(checked.follower.latest_choice()->plan.excess_bytes, 0u);
}

TEST(StepFollower, OtherTimesAndRatesMakeAnotherPlan) {
  const StepRecord record = small_step();
  CheckedFollower checked;
  play(checked, record, rules_at(kSmallLimits));
  play(checked, record, rules_at({50, 900, 1100}), {.speed = 1.1});
  EXPECT_EQ(checked.follower.plans_made(), 1u) << "not by a little";
  play(checked, record, rules_at(kSmallLimits), {.speed = 2});
  EXPECT_EQ(checked.follower.plans_made(), 2u);
  play(checked, record, rules_at({50, 2000, 1000}), {.speed = 2});
  EXPECT_EQ(checked.follower.plans_made(), 3u);
  play(checked, record, rules_at({50, 2000, 100}), {.speed = 2});
  EXPECT_EQ(checked.follower.plans_made(), 4u);
  play(checked, record, rules_at({50, 200, 100}), {.speed = 2});
  EXPECT_EQ(checked.follower.plans_made(), 4u) << "a busy machine never settles";
}

TEST(StepFollower, AnyCallsInAnyOrderDoNoHarm) {
  std::mt19937_64 any(23);
  CheckedFollower checked;
  size_t releases = 0, loads = 0, followed = 0, recomputed = 0;
  uint64_t last = 0;
  for (int step = 0; step < 10'000; ++step) {
    // Often a step that was seen before, and sometimes only its beginning.
    std::mt19937_64 random(any() % 12);
    size_t calls = random() % 90;
    if (any() % 4 == 0) calls = any() % 90;
    const size_t deviation = any() % 2 == 0 ? SIZE_MAX : any() % 90;
    const auto number = [&] { return random() % 50 == 0 ? random() : random() % 100; };
    for (size_t call = 0; call < calls; ++call) {
      if (call == deviation) random.seed(any());
      const uint64_t storage = random() % 20 == 0 ? random() : last - std::min(last, random() % 12);
      const double now = random() % 50 == 0 ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(call);
      const auto known_call = [&] { return static_cast<uint32_t>(random() % 12 == 0 ? random() : random() % 10); };
      switch (random() % 12) {
        case 0:
        case 1: {
          const NewStorage named{random() % 40, number(), known_call(), random() % 2 == 0 ? kNone : known_call()};
          last = checked.saved(named, number(), now);
          break;
        }
        case 2: checked.wanted(storage, number(), now); break;
        case 3: checked.dropped(storage); break;
        case 4: checked.missed(number()); break;
        case 5:
          checked.entered({.key = random() % 30, .module = random() % 8, .input_bytes = number()}, known_call(),
                          number(), now);
          break;
        case 6: checked.returned(known_call(), number(), now); break;
        case 7: checked.saved_again(storage, random() % 40, known_call()); break;
        case 8: checked.follower.fell_short(number()); break;
        default: checked.became_free(storage);
      }
      releases += checked.follower.actions().releases.size();
      loads += checked.follower.actions().loads.size();
      recomputed += checked.follower.is_recomputed(random() % 30) ? 1 : 0;
    }
    followed += checked.follower.is_following() ? 1 : 0;
    std::vector<std::pair<uint32_t, double>> times;
    while (any() % 4 != 0) times.emplace_back(any() % 60, any() % 60);
    checked.follower.set_times(times);
    StepRules rules = rules_at({any() % 20 == 0 ? any() % 100 : 50, 100, any() % 20 == 0 ? 0.0 : 100});
    if (any() % 4 == 0) rules.forbidden.insert(any() % 8);
    rules.may_recompute = any() % 8 != 0;
    rules.is_timed = any() % 4 != 0;
    rules.was_disturbed = any() % 8 == 0;
    if (any() % 20 == 0) checked.follower.choose_again(rules);
    checked.end_step(rules);
    if (HasFailure()) return;
  }
  EXPECT_GT(releases, 1000u);
  EXPECT_GT(loads, 100u);
  EXPECT_GT(followed, 1000u);
  EXPECT_GT(recomputed, 0u);
}

NewStorage first_storage() { return {.key = 1, .size_bytes = 10}; }

TEST(StepFollower, WhatOutlivesItsStepIsLeftAlone) {
  CheckedFollower checked;
  play(checked, small_step(), rules_at(kSmallLimits));
  const uint64_t old = checked.saved(first_storage(), 15, 0);
  checked.became_free(old);
  checked.end_step(rules_at(kSmallLimits));
  // Its number is none of the next step's.
  const uint64_t next = checked.saved(first_storage(), 15, 0);
  EXPECT_NE(next, old);
  const uint32_t events = checked.follower.event_count();
  checked.follower.wanted(old, 20, 0);
  checked.follower.became_free(old);
  checked.follower.dropped(old);
  EXPECT_EQ(checked.follower.event_count(), events);
}

TEST(StepFollower, AnEndlessStepIsNotRecorded) {
  StepFollower follower;
  const StepRules rules = rules_at({5, 1000, 1000});
  const uint64_t storage = follower.saved(first_storage(), 10, 0);
  for (size_t count = 0; count < kMostStepEvents; ++count) follower.wanted(storage, 10, 0);
  follower.became_free(storage);
  EXPECT_GT(follower.saved(first_storage(), 20, 0), storage);
  follower.end_step(rules);
  EXPECT_EQ(follower.plans_made(), 0u);
  follower.saved(first_storage(), 10, 0);
  follower.end_step(rules);
  EXPECT_EQ(follower.plans_made(), 1u) << "the next step is";
  follower.end_step(rules);
  EXPECT_EQ(follower.plans_made(), 1u) << "an empty one is not";
}

TEST(StepFollower, AnAbandonedStepTeachesNothing) {
  StepFollower follower;
  follower.saved(first_storage(), 10, 0);
  follower.abandon_step();
  EXPECT_EQ(follower.plans_made(), 0u);
  EXPECT_EQ(follower.latest_choice(), nullptr);
}

TEST(StepFollower, UnderOtherRulesStepsAreRecordedAnew) {
  const StepRules rules = rules_at(kSmallLimits);
  CheckedFollower checked;
  play(checked, small_step(), rules);
  checked.follower.forget_known();
  EXPECT_EQ(checked.follower.latest(), nullptr);
  EXPECT_FALSE(play(checked, small_step(), rules).was_followed);
  EXPECT_TRUE(play(checked, small_step(), rules).was_followed);
  // In the middle of a step, which goes on as it began.
  checked.saved(first_storage(), 10, 0);
  EXPECT_TRUE(checked.follower.is_following());
  checked.follower.forget_known();
  EXPECT_TRUE(checked.follower.is_following());
  checked.end_step(rules);
  EXPECT_FALSE(play(checked, small_step(), rules).was_followed);
}

TEST(StepFollower, TimesOfSomeEventsMoveThoseBetween) {
  StepRecord record;
  for (int event = 0; event < 9; ++event) record.events.push_back({StepEventKind::kSaved, 0, 0, 1.0 * event});
  record.events[5].seconds = std::numeric_limits<double>::quiet_NaN();
  // The second time of an event counts, and others than these are none.
  set_times(record, {{1, 10}, {3, 12}, {3, 20}, {2, 30}, {6, 26}, {6, 26}, {7, 28}, {99, 40}});
  const std::vector<double> expected = {10, 10, 11, 20, 22, 0, 26, 28, 28};
  for (size_t event = 0; event < expected.size(); ++event) {
    if (event == 5) continue;
    EXPECT_DOUBLE_EQ(record.events[event].seconds, expected[event]) << event;
  }
  set_times(record, {});
  EXPECT_DOUBLE_EQ(record.events[8].seconds, 28);
}

}  // namespace
}  // namespace ebbtide::policy
