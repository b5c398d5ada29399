// How long a step takes without waits, and a choice for what no forecast knows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "model_steps.h"
#include "played_step.h"
#include "policy/lms/step_choice.h"
#include "policy/lms/step_record.h"

namespace ebbtide::policy {
namespace {

// Eight calls of blocks that are built alike, and then one that is not, with gaps of these seconds between events.
StepRecord calls_with(const std::vector<double>& seconds) {
  StepRecord record;
  double now = 0;
  for (uint32_t call = 0; call < seconds.size(); ++call) {
    const uint32_t event = 2 * call;
    record.calls.push_back({.key = call + 1,
                            .module = call + 1,
                            .kind = call < 8 ? 7u : 9u,
                            .entered_at = event,
                            .returned_at = event + 1});
    record.events.push_back({StepEventKind::kEntered, call, 0, now});
    now += seconds[call];
    record.events.push_back({StepEventKind::kReturned, call, 0, now});
  }
  return record;
}

TEST(StepTimes, WhatIsAlikeTakesAlikeLong) {
  StepRecord record = calls_with({3, 9, 2, 4, 2, 50, 2, 2, 10});
  use_typical_times(record);
  for (uint32_t event = 0; event < record.events.size(); ++event)
    EXPECT_EQ(record.events[event].seconds, event < 16 ? 2.0 * ((event + 1) / 2) : event == 16 ? 16 : 26) << event;
  record = calls_with({std::numeric_limits<double>::quiet_NaN(), -1, std::numeric_limits<double>::infinity()});
  use_typical_times(record);
  for (const StepEvent& event : record.events) EXPECT_EQ(event.seconds, 0);
  record = {};
  use_typical_times(record);
}

TEST(StepTimes, InPagesAChoiceThatMovesNothingIsMeasuredToo) {
  const StepRecord record = transformer_step(1280, 12 * 1024);
  StepLimits limits = at_limit(part_of_peak(record, 70));
  const auto moves_nothing = [](const StepChoice& choice) { return choice.moved_bytes == 0; };
  const auto count = [&] {
    const std::vector<StepChoice> found = choose_steps(record, limits, find_blocks(record, {}));
    EXPECT_LE(found.size(), 3u);
    return std::count_if(found.begin(), found.end(), moves_nothing);
  };
  EXPECT_EQ(count(), 0);
  limits.has_pages = true;
  EXPECT_EQ(count(), 1);
  // Where plans with evictions leave so much free that no other one holds the limit, it may use what they leave.
  const uint64_t whole_bytes = std::exchange(limits.limit_bytes, part_of_peak(record, 8));
  EXPECT_EQ(count(), 0);
  limits.unmoved_bytes = whole_bytes;
  EXPECT_EQ(count(), 1);
}

// Of those without evictions the fastest, also where others within 1.2 of the best evict nothing, and where it is not.
TEST(StepTimes, InPagesTheFastestChoiceThatMovesNothingIsMeasured) {
  for (const auto& [width, percent, least, most] : {std::tuple{1280, 60, 1.0, 1.1}, {8192, 40, 1.04, 1.2}}) {
    const StepRecord record = transformer_step(static_cast<uint64_t>(width), 12 * 1024);
    const std::vector<Block> blocks = find_blocks(record, {});
    const uint64_t limit_bytes = part_of_peak(record, static_cast<uint64_t>(percent));
    const StepLimits limits{.limit_bytes = limit_bytes / 16 * 15,
                            .out_bytes_per_second = kLinkRate,
                            .in_bytes_per_second = kLinkRate,
                            .has_pages = true,
                            .unmoved_bytes = limit_bytes / 32 * 31};
    const std::vector<StepChoice> found = choose_steps(record, limits, blocks);
    const auto unmoved =
        std::find_if(found.begin(), found.end(), [](const StepChoice& choice) { return choice.plan.evicts_nothing(); });
    ASSERT_NE(unmoved, found.end()) << percent;
    EXPECT_GE(unmoved->seconds, least * found.front().seconds);
    EXPECT_LE(unmoved->seconds, most * found.front().seconds);
    ForcedChoice forced;
    for (const Block& block : unmoved->recomputed) forced.recomputed.insert(record.calls[block.call].name);
    forced.recomputed.erase(forced.recomputed.begin());
    EXPECT_FALSE(choose_forced(record, limits, blocks, forced).plan.evicts_nothing()) << "no block less would do";
  }
}

// What evicts may take more than its forecast. So may what is recomputed: the host's time is in no forecast.
TEST(StepTimes, InPagesWhatIsSlowerIsMeasuredOnlyIfItEvictsOrRecomputesLess) {
  const StepRecord record = transformer_step(1280, 12 * 1024);
  const std::vector<Block> blocks = find_blocks(record, {});
  size_t recomputing_less = 0, alone = 0;
  for (const double rate : {kLinkRate, kLinkRate / 2, kLinkRate / 4}) {
    for (uint64_t percent = 10; percent < 100; percent += 5) {
      const StepLimits limits{.limit_bytes = part_of_peak(record, percent),
                              .out_bytes_per_second = rate,
                              .in_bytes_per_second = rate,
                              .has_pages = true};
      const std::vector<StepChoice> found = choose_steps(record, limits, blocks);
      for (size_t index = 1; index < found.size(); ++index) {
        const StepChoice &choice = found[index], &before = found[index - 1];
        const bool evicts_less = choice.moved_bytes < before.moved_bytes;
        EXPECT_GE(choice.seconds, before.seconds) << percent;
        EXPECT_TRUE(evicts_less || choice.recomputed.size() < before.recomputed.size()) << percent;
        EXPECT_LE(choice.seconds, (evicts_less ? 1.2 : 1.1) * found.front().seconds) << percent;
        recomputing_less += evicts_less ? 0 : 1;
      }
      alone += found.size() == 1 ? 1 : 0;
    }
  }
  EXPECT_GT(recomputing_less, 0u);
  EXPECT_GT(alone, 0u);
}

TEST(StepTimes, InPagesWhatLeavesCostsTimeHoweverFastTheBusIs) {
  const StepRecord record = transformer_step(1280, 12 * 1024);
  const std::vector<Block> blocks = find_blocks(record, {});
  StepLimits limits{.limit_bytes = part_of_peak(record, 50), .out_bytes_per_second = 1e15, .in_bytes_per_second = 1e15};
  const StepChoice free = choose_steps(record, limits, blocks).front();
  EXPECT_TRUE(free.recomputed.empty());
  EXPECT_GT(free.moved_bytes, uint64_t{4} << 30);
  limits.has_pages = true;
  limits.unmoved_bytes = limits.limit_bytes;
  const StepChoice paged = choose_forced(record, limits, blocks, {});
  EXPECT_EQ(paged.moved_bytes, free.moved_bytes);
  EXPECT_NEAR(paged.seconds - free.seconds, 0.012 * static_cast<double>(free.moved_bytes) / (1 << 30), 1e-9);
  EXPECT_TRUE(choose_steps(record, limits, blocks).front().plan.evicts_nothing());
}

}  // namespace
}  // namespace ebbtide::policy
