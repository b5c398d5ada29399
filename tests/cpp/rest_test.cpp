#include "policy/lms/rest.h"

#include <gtest/gtest.h>

namespace ebbtide::policy {
namespace {

void end_steps(Rest& rest, uint32_t count) {
  for (uint32_t step = 0; step < count; ++step) rest.step_ended(true);
}

TEST(Rest, BeginsOnceAFewStepsInARowHaveFitted) {
  Rest rest;
  end_steps(rest, Rest::kStepsThatFit - 1);
  rest.step_ended(false);
  end_steps(rest, Rest::kStepsThatFit - 1);
  EXPECT_FALSE(rest.is_on());
  end_steps(rest, 1);
  EXPECT_TRUE(rest.is_on());
}

TEST(Rest, AShortageEndsItAndTheNextTakesLonger) {
  Rest rest;
  end_steps(rest, Rest::kStepsThatFit);
  EXPECT_FALSE(rest.is_over());
  rest.fell_short();
  rest.fell_short();
  EXPECT_TRUE(rest.is_on() && rest.is_over());
  rest.end();
  EXPECT_FALSE(rest.is_on() || rest.is_over());
  end_steps(rest, 16 * Rest::kStepsThatFit - 1);
  EXPECT_FALSE(rest.is_on());
  end_steps(rest, 1);
  EXPECT_TRUE(rest.is_on());
}

TEST(Rest, AShortageOutsideOfItOnlyCountsTheStepsAnew) {
  Rest rest;
  end_steps(rest, Rest::kStepsThatFit - 1);
  rest.fell_short();
  EXPECT_FALSE(rest.is_over());
  end_steps(rest, Rest::kStepsThatFit);
  EXPECT_TRUE(rest.is_on());
}

TEST(Rest, AnotherLimitEndsItAndNothingIsKnown) {
  Rest rest;
  end_steps(rest, Rest::kStepsThatFit);
  rest.fell_short();
  rest.end();
  end_steps(rest, 16 * Rest::kStepsThatFit);
  rest.forget();
  EXPECT_TRUE(rest.is_on() && rest.is_over());
  rest.end();
  end_steps(rest, Rest::kStepsThatFit);
  EXPECT_TRUE(rest.is_on());
}

}  // namespace
}  // namespace ebbtide::policy
