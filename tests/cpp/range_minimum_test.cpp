// Ranges that are added to, and small numbers that are found.
#include "policy/lms/range_minimum.h"

#include <gtest/gtest.h>

#include <random>
#include <utility>
#include <vector>

namespace ebbtide::policy {
namespace {

TEST(RangeMinimum, AnswersLikeALoop) {
  std::mt19937_64 random(9);
  for (int round = 0; round < 300; ++round) {
    std::vector<int64_t> values(random() % 40);
    const auto number = [&] { return static_cast<int64_t>(random() % 100) - 50; };
    for (int64_t& value : values) value = number();
    RangeMinimum minimum(values);
    for (int step = 0; step < 50; ++step) {
      size_t begin = random() % (values.size() + 1), end = random() % (values.size() + 1);
      if (begin > end) std::swap(begin, end);
      const int64_t bound = number();
      size_t first = begin, after_last = end;
      while (first < end && values[first] >= bound) ++first;
      while (after_last > begin && values[after_last - 1] >= bound) --after_last;
      EXPECT_EQ(minimum.first_below(begin, end, bound), first);
      EXPECT_EQ(minimum.after_last_below(begin, end, bound), after_last);
      minimum.add(begin, end, bound);
      for (size_t index = begin; index < end; ++index) values[index] += bound;
    }
  }
}

}  // namespace
}  // namespace ebbtide::policy
