// Steps that are recorded and followed: equal ones, others, and sequences that no training makes.
#include "policy/lms/step_follower.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "checked_follower.h"
#include "policy/lms/step_plan.h"
#include "step_replay.h"

namespace ebbtide::policy {
namespace {

TEST(StepFollower, AnEqualStepFollowsThePlan) {
  for (const StepRecord& record : {llama_step(), resnet_step()}) {
    for (const uint64_t percent : {80, 60, 40}) {
      const StepLimits limits = at_limit(part_of_peak(record, percent));
      CheckedFollower checked;
      const FollowedStep first = run_step(checked, record, limits);
      EXPECT_TRUE(first.done.departures.empty());
      EXPECT_FALSE(first.was_followed);
      const double planned = replay(record, make_plan(record, limits)).seconds;
      for (int step = 0; step < 3; ++step) {
        const FollowedStep next = run_step(checked, record, limits);
        EXPECT_TRUE(next.was_followed);
        EXPECT_LE(most(next.held), static_cast<int64_t>(limits.limit_bytes));
        expect_same_departures(next.done, make_plan(as_recorded(record), limits));
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
    const FollowedStep run = run_step(checked, small_step(), {1000, 1000, 1000});
    EXPECT_TRUE(run.done.departures.empty());
    EXPECT_EQ(run.was_followed, step > 0);
    EXPECT_EQ(checked.follower.excess_bytes(), 0u);
  }
  EXPECT_EQ(checked.follower.plans_made(), 1u);
}

TEST(StepFollower, RandomStepsHoldTheLimit) {
  std::mt19937_64 random(21);
  size_t departures = 0;
  for (int round = 0; round < 300; ++round) {
    StepRecord record = random_step(random, 10 + random() % 200);
    record.events.insert(record.events.begin(), StepEvent{StepEventKind::kSaved, 0, 0, 0});
    for (StepEvent& event : record.events) ++event.storage;
    record.events.front().storage = 0;
    record.sizes_bytes.insert(record.sizes_bytes.begin(), 0);
    const StepLimits limits{part_of_peak(record, 30 + random() % 70), 1000, 1000};
    CheckedFollower checked;
    run_step(checked, record, limits);
    // The follower cannot see that a demand went down at a drop: it never plans with too little.
    const int64_t bound = static_cast<int64_t>(limits.limit_bytes + make_plan(record, limits).excess_bytes);
    for (int step = 0; step < 2; ++step) {
      const FollowedStep run = run_step(checked, record, limits);
      EXPECT_TRUE(run.was_followed);
      EXPECT_LE(most(run.held), bound);
      expect_same_departures(run.done, make_plan(as_recorded(record), limits));
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
    run_step(checked, record, kSmallLimits);
    StepRecord other = record;
    for (int move = 0; move < 10; ++move) {
      // Never before its save, and never after its use.
      const size_t at = random() % (other.events.size() - 1);
      StepEvent &one = other.events[at], &next = other.events[at + 1];
      const bool is_free = one.kind == StepEventKind::kFree || next.kind == StepEventKind::kFree;
      if (!is_free || one.storage == next.storage) continue;
      std::swap(one.kind, next.kind);
      std::swap(one.storage, next.storage);
    }
    // Some are never seen to be free.
    std::erase_if(other.events,
                  [&](const StepEvent& event) { return event.kind == StepEventKind::kFree && random() % 8 == 0; });
    EXPECT_TRUE(run_step(checked, other, kSmallLimits).was_followed);
    EXPECT_EQ(checked.late_loads, 0u);
    EXPECT_EQ(checked.follower.plans_made(), 1u);
  }
}

TEST(StepFollower, StoragesThatAreFreeLateLeaveLate) {
  const StepRecord record = small_step();
  CheckedFollower checked;
  run_step(checked, record, kSmallLimits);
  const FollowedStep planned = run_step(checked, record, kSmallLimits);
  StepRecord other = record;
  // The first storage becomes free after the last one was saved.
  std::erase_if(other.events,
                [](const StepEvent& event) { return event.kind == StepEventKind::kFree && event.storage == 0; });
  const auto first_use = std::find_if(other.events.begin(), other.events.end(),
                                      [](const StepEvent& event) { return event.kind == StepEventKind::kWanted; });
  const auto at = static_cast<uint32_t>(first_use - other.events.begin());
  other.events.insert(first_use, {StepEventKind::kFree, 0, (first_use - 1)->demand_bytes, (first_use - 1)->seconds});
  const FollowedStep late = run_step(checked, other, kSmallLimits);
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
  const StepLimits limits{20, 1000, 1000};
  CheckedFollower checked;
  run_step(checked, step.record(), limits);
  const FollowedStep run = run_step(checked, step.record(), limits);
  ASSERT_EQ(run.done.departures.size(), 1u);
  EXPECT_EQ(run.done.departures[0].storage, unused);
}

TEST(StepFollower, ADemandThatStillFitsMakesNoOtherPlan) {
  StepRecord record = small_step();
  CheckedFollower checked;
  run_step(checked, record, {55, 1000, 1000});
  for (StepEvent& event : record.events) event.demand_bytes += 1;
  run_step(checked, record, {100, 1000, 1000});
  EXPECT_EQ(checked.follower.plans_made(), 2u);
  for (StepEvent& event : record.events) event.demand_bytes += 2;
  run_step(checked, record, {100, 1000, 1000});
  EXPECT_EQ(checked.follower.plans_made(), 2u);
  for (StepEvent& event : record.events) event.demand_bytes += 20;
  run_step(checked, record, {100, 1000, 1000});
  EXPECT_EQ(checked.follower.plans_made(), 3u);
}

TEST(StepFollower, AnotherLimitMakesAnotherPlan) {
  const StepRecord record = small_step();
  CheckedFollower checked;
  run_step(checked, record, kSmallLimits);
  run_step(checked, record, {40, 1000, 1000});
  EXPECT_EQ(checked.follower.plans_made(), 2u);
  EXPECT_LE(most(run_step(checked, record, {1000, 1000, 1000}).held), 40);
  EXPECT_TRUE(run_step(checked, record, {1000, 1000, 1000}).done.departures.empty());
  EXPECT_EQ(checked.follower.plans_made(), 3u);
  run_step(checked, record, {1, 1000, 1000});
  checked.saved(10, 15, 0);
  EXPECT_GT(checked.follower.excess_bytes(), 0u);
}

TEST(StepFollower, OtherTimesAndRatesMakeAnotherPlan) {
  const StepRecord record = small_step();
  CheckedFollower checked;
  run_step(checked, record, kSmallLimits);
  run_step(checked, record, {50, 900, 1100}, 1.1);
  EXPECT_EQ(checked.follower.plans_made(), 1u) << "not by a little";
  run_step(checked, record, kSmallLimits, 2);
  EXPECT_EQ(checked.follower.plans_made(), 2u);
  run_step(checked, record, {50, 2000, 1000}, 2);
  EXPECT_EQ(checked.follower.plans_made(), 3u);
  run_step(checked, record, {50, 2000, 100}, 2);
  EXPECT_EQ(checked.follower.plans_made(), 4u);
  run_step(checked, record, {50, 2000, 100}, 2);
  EXPECT_EQ(checked.follower.plans_made(), 4u);
}

// After one event the demand is higher than the samples show: only a miss tells. Returns whether there was one.
bool has_missed(CheckedFollower& checked, const StepRecord& record, size_t peak_event, uint64_t peak_bytes,
                uint64_t limit_bytes, uint64_t next_limit_bytes) {
  uint64_t away_bytes = 0;
  bool has_missed = false;
  std::vector<uint64_t> numbers;
  for (size_t index = 0; index < record.events.size(); ++index) {
    const StepEvent& event = record.events[index];
    if (event.kind == StepEventKind::kSaved)
      numbers.push_back(checked.saved(record.sizes_bytes[event.storage], event.demand_bytes, event.seconds));
    if (event.kind == StepEventKind::kFree) checked.became_free(numbers[event.storage]);
    if (event.kind == StepEventKind::kWanted) checked.wanted(numbers[event.storage], event.demand_bytes, event.seconds);
    if (event.kind == StepEventKind::kDropped) checked.dropped(numbers[event.storage]);
    away_bytes += 10 * checked.follower.actions().releases.size();
    away_bytes -= 10 * checked.follower.actions().loads.size();
    if (index != peak_event || peak_bytes <= limit_bytes + away_bytes) continue;
    has_missed = true;
    checked.missed(peak_bytes);
  }
  checked.end_step({next_limit_bytes, 1000, 1000});
  return has_missed;
}

TEST(StepFollower, MissesAreLearnedAndKept) {
  const StepRecord record = small_step();
  size_t misses = 0;
  for (size_t event = 8; event < record.events.size(); ++event) {
    SCOPED_TRACE(testing::Message() << "event " << event);
    const uint64_t peak = record.events[event].demand_bytes + 15;
    if (peak < 80) continue;
    CheckedFollower checked;
    EXPECT_FALSE(has_missed(checked, record, event, peak, 1000, 70));
    misses += has_missed(checked, record, event, peak, 70, 70) ? 1 : 0;
    EXPECT_FALSE(has_missed(checked, record, event, peak, 70, 70)) << "it is learned";
    // Later plans are made from steps without a miss.
    EXPECT_FALSE(has_missed(checked, record, event, peak, 70, 60));
    EXPECT_FALSE(has_missed(checked, record, event, peak, 60, 65));
    EXPECT_FALSE(has_missed(checked, record, event, peak, 65, 70));
    EXPECT_FALSE(has_missed(checked, record, event, peak, 70, 70));
  }
  EXPECT_GT(misses, 5u);
}

TEST(StepFollower, AnyCallsInAnyOrderDoNoHarm) {
  std::mt19937_64 any(23);
  CheckedFollower checked;
  size_t releases = 0, loads = 0, followed = 0;
  uint64_t last = 0;
  for (int step = 0; step < 10'000; ++step) {
    // Often a step that was seen before, and sometimes only its beginning.
    std::mt19937_64 random(any() % 6);
    size_t calls = random() % 60;
    if (any() % 4 == 0) calls = any() % 60;
    const size_t deviation = any() % 2 == 0 ? SIZE_MAX : any() % 60;
    for (size_t call = 0; call < calls; ++call) {
      if (call == deviation) random.seed(any());
      const auto number = [&] { return random() % 50 == 0 ? random() : random() % 100; };
      const uint64_t storage = random() % 20 == 0 ? random() : last - std::min(last, random() % 12);
      const double now = random() % 50 == 0 ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(call);
      switch (random() % 8) {
        case 0:
        case 1: last = checked.saved(number(), number(), now); break;
        case 2: checked.wanted(storage, number(), now); break;
        case 3: checked.dropped(storage); break;
        case 4: checked.missed(number()); break;
        default: checked.became_free(storage);
      }
      releases += checked.follower.actions().releases.size();
      loads += checked.follower.actions().loads.size();
    }
    followed += checked.follower.is_following() ? 1 : 0;
    checked.end_step({any() % 20 == 0 ? any() % 100 : 50, 100, any() % 20 == 0 ? 0.0 : 100});
    if (HasFailure()) return;
  }
  EXPECT_GT(releases, 1000u);
  EXPECT_GT(loads, 100u);
  EXPECT_GT(followed, 1000u);
}

TEST(StepFollower, WhatOutlivesItsStepIsLeftAlone) {
  const StepRecord record = small_step();
  CheckedFollower checked;
  run_step(checked, record, kSmallLimits);
  const uint64_t old = checked.saved(10, 15, 0);
  checked.became_free(old);
  checked.end_step(kSmallLimits);
  // Its number is none of the next step's, and no event of it deviates.
  const uint64_t next = checked.saved(10, 15, 0);
  EXPECT_NE(next, old);
  EXPECT_TRUE(checked.follower.is_following());
  checked.follower.wanted(old, 20, 0);
  checked.follower.became_free(old);
  checked.follower.dropped(old);
  EXPECT_TRUE(checked.follower.is_following());
}

TEST(StepFollower, AnEndlessStepIsNotRecorded) {
  StepFollower follower;
  const uint64_t storage = follower.saved(10, 10, 0);
  for (size_t count = 0; count < kMostStepEvents; ++count) follower.wanted(storage, 10, 0);
  follower.became_free(storage);
  EXPECT_GT(follower.saved(10, 20, 0), storage);
  follower.end_step({5, 1000, 1000});
  EXPECT_EQ(follower.plans_made(), 0u);
  follower.saved(10, 10, 0);
  follower.end_step({5, 1000, 1000});
  EXPECT_EQ(follower.plans_made(), 1u) << "the next step is";
  follower.end_step({5, 1000, 1000});
  EXPECT_EQ(follower.plans_made(), 1u) << "an empty one is not";
}

}  // namespace
}  // namespace ebbtide::policy
