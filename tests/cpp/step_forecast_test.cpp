// How long a step takes under a plan, by another way of counting.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "policy/lms/step_choice.h"
#include "step_replay.h"

namespace ebbtide::policy {
namespace {

// The same by another way: all that happens as tasks, each of which begins when those before it are done. Their times
// are raised until nothing changes.
double seconds_of_tasks(const StepRecord& record, const StepPlan& plan, const StepLimits& rates) {
  struct Task {
    double seconds = 0;         // that it takes
    std::vector<size_t> after;  // these
  };
  std::vector<Task> tasks(1);
  size_t device = 0, out_link = 0, in_link = 0;  // the last task of each
  std::vector<size_t> out(plan.departures.size(), 0), in(plan.departures.size(), 0);
  const auto add = [&](double seconds, std::vector<size_t> after) {
    tasks.push_back({seconds, std::move(after)});
    return tasks.size() - 1;
  };
  for (uint32_t event = 0; event < record.events.size(); ++event) {
    const double before = event == 0 ? 0 : record.events[event - 1].seconds;
    device = add(record.events[event].seconds - before, {device});
    for (const auto& [at, kind, index] : plan.actions) {
      if (at != event) continue;
      const auto bytes = static_cast<double>(record.storages[plan.departures[index].storage].size_bytes);
      if (kind == StepActionKind::kCopyOut)
        out[index] = out_link = add(bytes / rates.out_bytes_per_second, {device, out_link});
      if (kind == StepActionKind::kRelease) device = add(0, {device, out[index]});
      if (kind == StepActionKind::kLoad)
        in[index] = in_link = add(bytes / rates.in_bytes_per_second, {device, in_link, out[index]});
    }
    for (size_t index = 0; index < plan.departures.size(); ++index)
      if (plan.departures[index].end_at == event) device = add(0, {device, in[index]});
  }
  std::vector<double> done(tasks.size(), 0);
  for (bool has_changed = true; std::exchange(has_changed, false);) {
    for (size_t task = 0; task < tasks.size(); ++task) {
      double begin = 0;
      for (const size_t earlier : tasks[task].after) begin = std::max(begin, done[earlier]);
      has_changed |= done[task] < begin + tasks[task].seconds;
      done[task] = std::max(done[task], begin + tasks[task].seconds);
    }
  }
  return done[device];
}

TEST(StepForecast, AForecastIsThatOfTasksThatWaitForOneAnother) {
  std::mt19937_64 random(9);
  size_t longer = 0;
  for (int round = 0; round < 300; ++round) {
    const StepRecord record = random_step(random, 20 + random() % 100);
    const StepLimits limits{peak_bytes(record) / 100 * (random() % 100), static_cast<double>(100 + random() % 3000),
                            static_cast<double>(100 + random() % 3000)};
    const StepPlan plan = make_plan(record, limits);
    const double seconds = forecast_seconds(record, plan, limits);
    EXPECT_NEAR(seconds, seconds_of_tasks(record, plan, limits), 1e-9);
    longer += seconds > record.events.back().seconds + 1e-9 ? 1 : 0;
  }
  EXPECT_GT(longer, 100u);
}

TEST(StepForecast, AForecastWithUselessNumbersIsANumber) {
  StepRecord record = llama_step();
  record.storages[3].size_bytes = 0;
  record.events[7].seconds = std::numeric_limits<double>::quiet_NaN();
  for (const double rate : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    const StepLimits limits{peak_bytes(record) / 100 * 60, rate, rate};
    EXPECT_GT(forecast_seconds(record, make_plan(record, limits), limits), 1e300);
  }
}

}  // namespace
}  // namespace ebbtide::policy
