// When torch's cache is given back between two steps, because steps flush.
#include "policy/lms/flushes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "model_steps.h"
#include "played_step.h"
#include "policy/lms/known_step.h"

namespace ebbtide::policy {
namespace {

using Advice = Flushes::Advice;

TEST(StepFlushes, TheCacheIsGivenBackOnceAndThenEverMoreSeldom) {
  Flushes flushes;
  EXPECT_EQ(flushes.note(false, true), Advice::kKeep);
  EXPECT_EQ(flushes.note(true, true), Advice::kGiveBack);
  for (uint64_t patience = 4; patience < 9000; patience *= 2) {
    for (uint64_t step = 0; step < std::min<uint64_t>(patience, 4096); ++step)
      ASSERT_EQ(flushes.note(true, true), Advice::kKeep) << patience << " " << step;
    EXPECT_EQ(flushes.note(true, true), Advice::kGiveBack) << patience;
  }
}

TEST(StepFlushes, WhereItHelpedForLongItIsGivenBackAsSoonAgain) {
  for (const int quiet_steps : {63, 64}) {
    Flushes flushes;
    flushes.note(true, true);
    for (int step = 0; step < quiet_steps; ++step) EXPECT_EQ(flushes.note(false, true), Advice::kKeep);
    EXPECT_EQ(flushes.note(true, true), Advice::kGiveBack);
    int patience = 0;
    while (flushes.note(true, true) == Advice::kKeep) ++patience;
    EXPECT_EQ(patience, quiet_steps == 63 ? 8 : 4);
  }
}

TEST(StepFlushes, TheCacheIsGivenBackWhereLittleIsInUse) {
  Flushes flushes;
  EXPECT_EQ(flushes.note(true, false), Advice::kWait);
  EXPECT_EQ(flushes.note(false, false), Advice::kWait);
  EXPECT_EQ(flushes.note(false, true), Advice::kGiveBack);
  EXPECT_EQ(flushes.note(false, true), Advice::kKeep);
  LittleUse little_use;
  EXPECT_TRUE(little_use.note(100, 10));
  EXPECT_FALSE(little_use.note(111, 10));
  EXPECT_TRUE(little_use.note(110, 10));
  EXPECT_TRUE(little_use.note(50, 10));
  for (int step = 0; step < 7; ++step) EXPECT_FALSE(little_use.note(100, 10)) << step;
  EXPECT_TRUE(little_use.note(100, 10)) << "what was longer ago does not count";
}

// Two micro-batches to a step, and gradients in use between them. The first choice evicts, and the last one does not.
class FlushingSteps : public testing::Test {
 protected:
  FlushingSteps() {
    rules_.limits.has_pages = true;
    rules_.demand_bytes = kBetweenSteps;
  }
  void note(KnownStep& known, uint64_t used_bytes, bool has_flushed, const Shortages& shortages = {}) {
    rules_.demand_bytes = used_bytes;
    rules_.has_flushed = has_flushed;
    known.note(known.current().choice().record, {{0, 0}, {1, 1}}, shortages, rules_);
  }
  KnownStep known_that_evicts_nothing() {
    KnownStep known(record_, rules_);
    EXPECT_EQ(known.choices().size(), 2u);
    for (int step = 0; step < 2; ++step) {
      EXPECT_FALSE(known.current().plan().evicts_nothing());
      note(known, kBetweenSteps, true);
      EXPECT_FALSE(known.must_give_back()) << "the next step would need to flush as well";
    }
    EXPECT_TRUE(known.current().plan().evicts_nothing());
    return known;
  }

  static constexpr uint64_t kBetweenSteps = 1000, kBetweenMicroBatches = 2'000'000'000;
  const StepRecord record_ = transformer_step(1280, 12 * 1024);
  StepRules rules_ = rules_at(at_limit(part_of_peak(record_, 70)));
};

TEST_F(FlushingSteps, TheCacheIsGivenBackAfterTheStepAndNotBetweenMicroBatches) {
  KnownStep known = known_that_evicts_nothing();
  note(known, kBetweenMicroBatches, true);
  EXPECT_FALSE(known.must_give_back());
  note(known, kBetweenSteps, false);
  EXPECT_TRUE(known.must_give_back());
  note(known, kBetweenMicroBatches, false);
  EXPECT_FALSE(known.must_give_back());
}

TEST_F(FlushingSteps, WithoutPagesTheCacheStays) {
  KnownStep known = known_that_evicts_nothing();
  rules_.limits.has_pages = false;
  for (int step = 0; step < 8; ++step) {
    note(known, kBetweenSteps, true);
    EXPECT_FALSE(known.must_give_back());
  }
}

TEST_F(FlushingSteps, AFlushThatLaterStepsAreSparedTeachesNoMargin) {
  KnownStep known = known_that_evicts_nothing();
  const Shortages shortages = {{0, rules_.limits.limit_bytes / 32}};
  const uint64_t before_bytes = known.margin_bytes();
  note(known, kBetweenMicroBatches, true, shortages);
  note(known, kBetweenSteps, true, shortages);
  EXPECT_EQ(known.margin_bytes(), before_bytes);
  note(known, kBetweenSteps, true, shortages);
  EXPECT_GT(known.margin_bytes(), before_bytes);
}

// It is judged by steps that find memory as steps of its own have left it.
TEST_F(FlushingSteps, ATimeWithAFlushThatLaterStepsAreSparedDoesNotCount) {
  KnownStep known = known_that_evicts_nothing();
  const TriedChoice& last = known.choices().back();
  note(known, kBetweenMicroBatches, true);
  EXPECT_EQ(last.measured_steps(), 1u);
  note(known, kBetweenSteps, true);
  EXPECT_EQ(last.measured_steps(), 1u);
  EXPECT_TRUE(known.must_give_back());
  rules_.was_disturbed = true;  // it maps anew what it uses
  note(known, kBetweenSteps, false);
  EXPECT_EQ(last.measured_steps(), 1u);
  EXPECT_FALSE(known.is_settled());
  rules_.was_disturbed = false;
  note(known, kBetweenSteps, true);
  EXPECT_EQ(last.measured_steps(), 2u) << "what giving back has not helped is its own time";
  EXPECT_TRUE(known.is_settled());
}

}  // namespace
}  // namespace ebbtide::policy
