// Steps that differ from those before: they fall back, are planned for, and are known together.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "checked_follower.h"
#include "policy/lms/step_plan.h"
#include "step_replay.h"

namespace ebbtide::policy {
namespace {

// A step that differs from its turn `at` on: other sizes, other uses, one less, one more.
StepRecord deviating(const StepRecord& record, size_t at, int how) {
  StepRecord other = record;
  StepEvent& event = other.events[at];
  if (how == 0 && event.kind == StepEventKind::kSaved) ++other.sizes_bytes[event.storage];
  if (how == 0 && event.kind == StepEventKind::kWanted) event.storage = 0;
  if (how == 1) other.events.resize(at);
  if (how == 2) {
    other.sizes_bytes.push_back(7);
    const auto storage = static_cast<uint32_t>(other.sizes_bytes.size() - 1);
    other.events.insert(other.events.begin() + static_cast<std::ptrdiff_t>(at),
                        {StepEventKind::kSaved, storage, event.demand_bytes, event.seconds});
  }
  return other;
}

TEST(StepDeviation, AnyDeviationFallsBackAndIsLearned) {
  const StepRecord record = small_step();
  size_t deviations = 0, acted_before = 0;
  for (size_t at = 0; at < record.events.size(); ++at) {
    const StepEventKind kind = record.events[at].kind;
    for (int how = 0; how < 3; ++how) {
      const bool is_turn = kind == StepEventKind::kSaved || kind == StepEventKind::kWanted;
      if (how == 0 && (!is_turn || (kind == StepEventKind::kWanted && record.events[at].storage == 0))) continue;
      if (how == 1 && (at == 0 || at + 1 == record.events.size())) continue;  // empty, or without the last drop only
      const StepRecord other = deviating(record, at, how);
      SCOPED_TRACE(testing::Message() << "event " << at << ", deviation " << how);
      CheckedFollower checked;
      run_step(checked, record, kSmallLimits);
      const FollowedStep run = run_step(checked, other, kSmallLimits);
      EXPECT_EQ(run.was_followed, how == 1) << "a step that ends early shows only then";
      for (const StepAction& action : run.done.actions) {
        EXPECT_LT(action.event, at);
        ++acted_before;
      }
      EXPECT_EQ(checked.follower.plans_made(), 2u);
      EXPECT_TRUE(run_step(checked, other, kSmallLimits).was_followed) << "it is known now";
      EXPECT_TRUE(run_step(checked, record, kSmallLimits).was_followed) << "and the other one still is";
      EXPECT_EQ(checked.follower.plans_made(), 2u);
      ++deviations;
    }
  }
  EXPECT_GT(deviations, 50u);
  EXPECT_GT(acted_before, 50u);
}

TEST(StepDeviation, AlternatingStepsAreKnownTogether) {
  CheckedFollower checked;
  const std::vector<StepRecord> steps = {small_step(10), small_step(20), small_step(10, 12), small_step(5, 3)};
  for (int round = 0; round < 5; ++round) {
    for (const StepRecord& record : steps) {
      const FollowedStep run = run_step(checked, record, kSmallLimits);
      EXPECT_EQ(run.was_followed, round > 0);
      EXPECT_LE(most(run.held), round > 0 ? 50 : 200);
    }
  }
  EXPECT_EQ(checked.follower.plans_made(), steps.size());
  // A fifth one takes the place of the one that was followed longest ago.
  EXPECT_TRUE(run_step(checked, steps[0], kSmallLimits).was_followed);
  run_step(checked, small_step(30), kSmallLimits);
  EXPECT_TRUE(run_step(checked, steps[0], kSmallLimits).was_followed);
  EXPECT_FALSE(run_step(checked, steps[1], kSmallLimits).was_followed);
}

TEST(StepDeviation, AStepWithTheBeginningOfAnotherIsTakenOver) {
  // They differ in the last layer of forward only. The short one needs no copies out.
  const StepRecord brief = small_step(10, 6), full = small_step(10, 12);
  const StepLimits limits{80, 1000, 1000};
  CheckedFollower checked;
  run_step(checked, full, limits);
  run_step(checked, brief, limits);
  for (int round = 0; round < 3; ++round) {
    const FollowedStep taken_over = run_step(checked, full, limits);
    EXPECT_TRUE(taken_over.was_followed);
    EXPECT_LE(most(taken_over.held), 80);
    EXPECT_FALSE(taken_over.done.departures.empty());
    EXPECT_TRUE(run_step(checked, brief, limits).was_followed);
  }
  EXPECT_EQ(checked.follower.plans_made(), 2u);
}

TEST(StepDeviation, AStepThatIsTakenOverHoldsTheLimitAndLoads) {
  std::mt19937_64 random(24);
  size_t taken_over = 0;
  for (int round = 0; round < 3000; ++round) {
    // Two steps with a common beginning.
    const uint64_t seed = random();
    std::mt19937_64 one_random(seed), other_random(seed);
    const size_t count = 20 + random() % 100;
    const StepRecord one = random_step(one_random, count);
    const size_t branch = random() % count;
    const StepRecord other = random_step(other_random, count, branch, random());
    const StepLimits limits{part_of_peak(other, 40 + random() % 60), 1000, 1000};
    if (make_plan(as_recorded(one), limits).excess_bytes + make_plan(as_recorded(other), limits).excess_bytes > 0)
      continue;
    CheckedFollower checked;
    run_step(checked, other, limits);
    run_step(checked, one, limits);
    if (checked.follower.plans_made() < 2) continue;
    const FollowedStep run = run_step(checked, other, limits);
    if (!run.was_followed) continue;  // it became the other one in a turn that `one` does not have
    EXPECT_LE(most(run.held), static_cast<int64_t>(limits.limit_bytes));
    // Storages that the plan wants back come back, whichever plan made it leave. Only the turn that told them apart is
    // too late.
    int lost = 0;
    for (const Departure& planned : make_plan(as_recorded(other), limits).departures) {
      for (const Departure& done : run.done.departures) {
        const bool is_same = planned.storage == done.storage && planned.end_at == done.end_at;
        if (is_same && planned.load_at != kNoEvent && done.load_at == kNoEvent) ++lost;
      }
    }
    EXPECT_LE(lost, 1);
    ++taken_over;
    if (HasFailure()) return;
  }
  EXPECT_GT(taken_over, 200u);
}

}  // namespace
}  // namespace ebbtide::policy
