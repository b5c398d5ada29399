// What a report says of a plan: where each byte of a step is, and what other limits would give.
#include "policy/lms/step_report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "model_steps.h"
#include "played_step.h"
#include "step_replay.h"

namespace ebbtide::policy {
namespace {

constexpr uint64_t kTokens = 4096;

uint64_t saved_bytes(const StepRecord& record) {
  uint64_t bytes = 0;
  for (const RecordedStorage& storage : record.storages) bytes += storage.size_bytes;
  return bytes;
}

TEST(StepReport, EachByteIsKeptEvictedOrRecomputed) {
  const StepRecord record = transformer_step(1280, kTokens);
  for (const uint64_t percent : {100, 70, 40}) {
    for (const bool may_recompute : {false, true}) {
      StepRules rules = rules_at(at_limit(part_of_peak(record, percent) + 100));
      rules.may_recompute = may_recompute;
      const KnownStep step(record, rules);
      const StepReport report = report_on(step, 0);
      uint64_t kept = 0, evicted = 0, recomputed = 0, dropped = 0;
      for (const ModuleReport& each : report.modules) {
        kept += each.kept_bytes;
        evicted += each.evicted_bytes;
        recomputed += each.recomputed_bytes;
      }
      for (const Block& block : step.current().choice().recomputed) dropped += block.dropped_bytes;
      EXPECT_EQ(kept + evicted + recomputed, saved_bytes(record));
      EXPECT_EQ(recomputed, dropped);
      EXPECT_EQ(recomputed > 0, may_recompute && percent < 100);
      EXPECT_EQ(evicted, step.current().choice().moved_bytes);
      EXPECT_EQ(report.limit_bytes, rules.limits.limit_bytes);
      EXPECT_EQ(report.peak_bytes, peak_bytes(record));
    }
  }
}

TEST(StepReport, EachChoiceWithWhatItsStepsTook) {
  const StepRecord record = transformer_step(1280, 12 * 1024);
  const StepRules rules = mixed(record, 85);
  CheckedFollower checked;
  for (int step = 0; step < 10; ++step) play(checked, record, rules);
  const KnownStep& known = *checked.follower.latest();
  const std::vector<ChoiceReport> choices = report_on(known, 0).choices;
  ASSERT_GT(choices.size(), 1u);
  double fastest = INFINITY;
  for (const ChoiceReport& each : choices) {
    EXPECT_GT(each.forecast.seconds, 0);
    EXPECT_GT(each.measured_seconds, 0);
    fastest = std::min(fastest, each.measured_seconds);
  }
  const auto current = std::find_if(choices.begin(), choices.end(), [](const auto& each) { return each.is_current; });
  ASSERT_NE(current, choices.end());
  EXPECT_EQ(current->measured_seconds, fastest);
  EXPECT_EQ(current->forecast.recomputed_calls, known.current().choice().recomputed.size());
}

// Also of a plan that was made anew since it was chosen.
TEST(StepReport, WhatAChoiceEvictsIsWhatItsPlanDoes) {
  const StepRecord record = transformer_step(1280, kTokens);
  const StepRules rules = copies_only(record, 70);
  CheckedFollower checked;
  for (int step = 0; step < 5; ++step) play(checked, record, rules);
  const StepRecord grown = with_base(record, static_cast<int64_t>(rules.limits.limit_bytes / 20));
  for (int step = 0; step < 5; ++step) play(checked, grown, rules);
  const StepReport report = report_on(*checked.follower.latest(), 0);
  uint64_t evicted = 0;
  for (const ModuleReport& each : report.modules) evicted += each.evicted_bytes;
  EXPECT_GT(evicted, on_demand_bytes(record, rules.limits.limit_bytes, true));
  EXPECT_EQ(report.choices.front().forecast.moved_bytes, evicted);
}

TEST(StepReport, AtItsPeakNothingHasToLeave) {
  const StepRecord record = transformer_step(1280, kTokens);
  for (const uint64_t part : {uint64_t{0}, uint64_t{16}}) {
    StepRules rules = mixed(record, 70);
    rules.limits.has_pages = true;
    const KnownStep step(record, rules, part == 0 ? 0 : rules.limits.limit_bytes / part);
    const uint64_t peak_bytes = report_on(step, 0).peak_bytes;
    const auto leaves = [&](uint64_t limit_bytes) {
      const StepChoice choice = step.choice_within(limit_bytes);
      return !choice.plan.evicts_nothing() || !choice.recomputed.empty();
    };
    EXPECT_FALSE(leaves(peak_bytes));
    EXPECT_TRUE(leaves(peak_bytes - peak_bytes / 1000));
  }
}

TEST(StepReport, WhatIsInUseStaysBelowTheLimit) {
  const StepRecord record = transformer_step(1280, kTokens);
  const StepRules rules = mixed(record, 60);
  const StepReport report = report_on(KnownStep(record, rules), 0);
  const auto by_bytes = [](const auto& one, const auto& other) { return one.second < other.second; };
  EXPECT_EQ(std::max_element(report.without.begin(), report.without.end(), by_bytes)->second, peak_bytes(record));
  const uint64_t most = std::max_element(report.with.begin(), report.with.end(), by_bytes)->second;
  EXPECT_LE(most, rules.limits.limit_bytes);
  EXPECT_GT(most, rules.limits.limit_bytes / 10 * 9);
  EXPECT_TRUE(std::is_sorted(report.with.begin(), report.with.end(),
                             [](const auto& one, const auto& other) { return one.first < other.first; }));
}

TEST(StepReport, WhatLiesElsewhereCountsOnNeitherSide) {
  const StepRecord record = transformer_step(1280, kTokens);
  const KnownStep step(record, mixed(record, 60));
  const StepReport all = report_on(step, 0), less = report_on(step, 1000);
  EXPECT_EQ(less.limit_bytes, all.limit_bytes - 1000);
  EXPECT_EQ(less.peak_bytes, all.peak_bytes - 1000);
  for (size_t index = 0; index < all.with.size(); ++index)
    EXPECT_EQ(less.with[index].second, all.with[index].second - std::min<uint64_t>(1000, all.with[index].second));
}

TEST(StepReport, AHigherLimitIsNoSlower) {
  const StepRecord record = transformer_step(1280, kTokens);
  const KnownStep step(record, mixed(record, 40));
  double before = 1e9;
  for (const uint64_t percent : {40, 60, 80, 101}) {
    const Forecast found = forecast_at(step, part_of_peak(record, percent));
    EXPECT_LE(found.seconds, before);
    EXPECT_EQ(found.moved_bytes + found.recomputed_calls > 0, percent < 100);
    before = found.seconds;
  }
  EXPECT_DOUBLE_EQ(before, record.events.back().seconds);
  EXPECT_EQ(report_on(KnownStep({}, {}), 0).modules.size(), 0u);
}

}  // namespace
}  // namespace ebbtide::policy
