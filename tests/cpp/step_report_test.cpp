// What a report says of a plan: where each byte of a step is, and what other limits would give.
#include "policy/lms/step_report.h"

#include <gtest/gtest.h>

#include <algorithm>

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
