#include "policy/lms/step_choice.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

namespace ebbtide::policy {
namespace {

// Forecasts that may be in the wrong order. In pages, what evicts more hardly takes less than its forecast.
constexpr double kAlike = 1.2, kAlikeEvicting = 1.1;
// Of what was evicted in pages: torch unmaps it in a flush, and maps it again. On an H200 it was 10 to 39 ms a GiB.
constexpr double kPageSecondsPerByte = 12e-3 / (1 << 30);
constexpr size_t kMostCounts = 24;   // of blocks that are tried in each order
constexpr uint64_t kStateParts = 4;  // optimizer states leave in so many

// By the bytes that a second of recomputing saves, in steps of a fifth: blocks of one kind are equal.
int worth(const Block& block) {
  const auto bytes = static_cast<double>(block.dropped_bytes - std::min(block.dropped_bytes, block.added_bytes));
  return static_cast<int>(std::lround(4 * std::log2(std::max(bytes, 1.0) / std::max(block.forward_seconds, 1e-9))));
}

// The order in which blocks are taken, the most worthwhile first; among equal ones from the step's beginning, from its
// end, or spread over it, so that copies of those between find time.
enum class Order : uint8_t { kFirst, kLast, kSpread };

// The bits of a number in reverse: 0 1 2 3 4 5 6 7 becomes 0 4 2 6 1 5 3 7.
uint32_t spread(uint32_t number) {
  uint32_t reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= ((number >> bit) & 1u) << (31 - bit);
  return reversed;
}

std::vector<uint32_t> in_order(const std::vector<Block>& blocks, Order order) {
  std::vector<uint32_t> indices(blocks.size());
  std::iota(indices.begin(), indices.end(), 0u);
  const auto rank = [&](uint32_t index) {
    const uint32_t place = order == Order::kFirst ? index : order == Order::kLast ? ~index : spread(index);
    return std::tuple(-worth(blocks[index]), place);
  };
  std::sort(indices.begin(), indices.end(), [&](uint32_t left, uint32_t right) { return rank(left) < rank(right); });
  return indices;
}

double state_seconds(uint64_t state_bytes, const StepLimits& limits) {
  const double rate = std::min(limits.out_bytes_per_second, limits.in_bytes_per_second);
  return state_bytes == 0 ? 0 : copy_seconds(state_bytes, rate) / std::max(limits.steps_per_update, 1.0);
}

StepChoice make_choice(const StepRecord& record, const StepLimits& limits, std::vector<Block> taken,
                       uint64_t state_bytes) {
  StepChoice choice;
  choice.record = taken.empty() ? record : with_recomputation(record, taken);
  choice.recomputed = std::move(taken);
  choice.state_bytes = state_bytes;
  choice.state_seconds = state_seconds(state_bytes, limits);
  plan_again(choice, limits);
  return choice;
}

class Chooser {
 public:
  Chooser(const StepRecord& record, const StepLimits& limits, const std::vector<Block>& blocks)
      : record_(record), limits_(limits), blocks_(blocks) {}

  std::vector<StepChoice> choose() {
    const double plain_seconds = record_.events.empty() ? 0 : record_.events.back().seconds;
    const uint64_t parts = limits_.state_bytes > 0 ? kStateParts : 0;
    for (uint64_t part = 0; part <= parts; ++part) {
      state_bytes_ = part == parts ? limits_.state_bytes : limits_.state_bytes / parts * part;
      if (part > 0 && is_lost(plain_seconds + state_seconds(state_bytes_, limits_))) break;
      if (try_blocks({}) && none_ && none_->plan.evicts_nothing()) break;
      for (const Order order : {Order::kFirst, Order::kLast, Order::kSpread}) try_counts(in_order(blocks_, order));
    }
    return results();
  }

 private:
  // Whether a choice of so many seconds can't be the best one.
  bool is_lost(double seconds) const {
    const auto beats = [&](const std::optional<StepChoice>& best) {
      return best && excess(*best) == 0 && best->seconds <= seconds;
    };
    return beats(none_) || beats(some_) || beats(all_);
  }

  // The best number of blocks is likely between two that were tried: it is looked for there in ever smaller steps.
  void try_counts(const std::vector<uint32_t>& order) {
    const size_t most = order.size();
    size_t stride = std::max<size_t>((most + kMostCounts - 1) / kMostCounts, 1);
    std::optional<size_t> best;
    const auto try_count = [&](size_t count) {
      std::vector<Block> taken;
      for (size_t index = 0; index < count; ++index) taken.push_back(blocks_[order[index]]);
      if (try_blocks(std::move(taken))) best = count;
    };
    for (size_t count = stride; count < most; count += stride) try_count(count);
    if (most > 0) try_count(most);
    while (best && stride > 1) {
      stride = (stride + 1) / 2;
      const size_t middle = *best;
      if (middle > stride) try_count(middle - stride);
      if (middle + stride < most) try_count(middle + stride);
    }
  }

  // Whether it is the best of its kind so far.
  bool try_blocks(std::vector<Block> taken) {
    std::sort(taken.begin(), taken.end(), [](const Block& left, const Block& right) { return left.call < right.call; });
    StepChoice choice = make_choice(record_, limits_, std::move(taken), state_bytes_);
    const size_t count = choice.recomputed.size();
    // Without evictions memory lies in fewer pieces, of which forecasts know little.
    if (limits_.has_pages && count > 0 && choice.plan.evicts_nothing() && (!unmoved_ || is_better(choice, *unmoved_)))
      unmoved_ = choice;
    std::optional<StepChoice>& best = count == 0 ? none_ : count == blocks_.size() ? all_ : some_;
    if (best && !is_better(choice, *best)) return false;
    best = std::move(choice);
    return true;
  }

  // What exceeds the limit by little (a part in 64) is left to chance.
  uint64_t excess(const StepChoice& choice) const {
    return choice.plan.excess_bytes / std::max<uint64_t>(limits_.limit_bytes / 64, 1);
  }
  bool is_better(const StepChoice& one, const StepChoice& other) const {
    return std::tuple(excess(one), one.seconds, one.recomputed.size()) <
           std::tuple(excess(other), other.seconds, other.recomputed.size());
  }

  std::vector<StepChoice> results() {
    std::vector<StepChoice> found;
    for (std::optional<StepChoice>* each : {&none_, &some_, &all_, &unmoved_})
      if (*each) found.push_back(std::move(**each));
    std::sort(found.begin(), found.end(), [&](const auto& one, const auto& other) { return is_better(one, other); });
    const double most_seconds = kAlike * found.front().seconds;
    const uint64_t least_excess = excess(found.front());
    std::erase_if(found, [&](const StepChoice& choice) {
      return choice.seconds > most_seconds || excess(choice) > least_excess;
    });
    return limits_.has_pages ? without_worse(std::move(found)) : found;
  }

  // What is slower has to evict less, or to recompute less and to be hardly slower.
  static std::vector<StepChoice> without_worse(std::vector<StepChoice> found) {
    const double most_seconds = kAlikeEvicting * found.front().seconds;
    std::vector<StepChoice> kept;
    for (StepChoice& choice : found) {
      const bool evicts_least = std::all_of(
          kept.begin(), kept.end(), [&](const StepChoice& other) { return choice.moved_bytes < other.moved_bytes; });
      const bool recomputes_least = std::all_of(kept.begin(), kept.end(), [&](const StepChoice& other) {
        return choice.recomputed.size() < other.recomputed.size();
      });
      if (evicts_least || (recomputes_least && choice.seconds <= most_seconds)) kept.push_back(std::move(choice));
    }
    return kept;
  }

  const StepRecord& record_;
  const StepLimits& limits_;
  const std::vector<Block>& blocks_;
  uint64_t state_bytes_ = 0;                     // of optimizer states, on the host in what is tried
  std::optional<StepChoice> none_, some_, all_;  // the best that recompute none of the blocks, some, all
  std::optional<StepChoice> unmoved_;            // the best that recompute blocks, and evict nothing
};

}  // namespace

double forecast_seconds(const StepRecord& record, const StepPlan& plan, const StepLimits& limits) {
  double device = 0, out_link = 0, in_link = 0, before = 0;
  std::vector<double> out_done(plan.departures.size(), 0), in_done(plan.departures.size(), 0);
  auto action = plan.actions.begin();
  size_t ended = 0;
  for (uint32_t event = 0; event < record.events.size(); ++event) {
    const double seconds = record.events[event].seconds;
    if (seconds > before) device += seconds - std::exchange(before, seconds);
    for (; action != plan.actions.end() && action->event == event; ++action) {
      const size_t index = action->departure;
      const uint64_t bytes = record.storages[plan.departures[index].storage].size_bytes;
      if (action->kind == StepActionKind::kCopyOut)
        out_done[index] = out_link = std::max(out_link, device) + copy_seconds(bytes, limits.out_bytes_per_second);
      if (action->kind == StepActionKind::kRelease) device = std::max(device, out_done[index]);
      if (action->kind != StepActionKind::kLoad) continue;
      const double ready = std::max({in_link, device, out_done[index]});
      in_done[index] = in_link = ready + copy_seconds(bytes, limits.in_bytes_per_second);
    }
    for (; ended < plan.departures.size() && plan.departures[ended].end_at <= event; ++ended)
      device = std::max(device, in_done[ended]);
  }
  return device;
}

void plan_again(StepChoice& choice, const StepLimits& limits) {
  choice.plan = make_plan(choice.record, limits_of(limits, choice));
  choice.moved_bytes = 0;
  for (const Departure& departure : choice.plan.departures)
    choice.moved_bytes += choice.record.storages[departure.storage].size_bytes;
  choice.seconds = forecast_seconds(choice.record, choice.plan, limits) + choice.state_seconds;
  if (limits.has_pages) choice.seconds += kPageSecondsPerByte * static_cast<double>(choice.moved_bytes);
}

StepLimits limits_of(StepLimits limits, const StepChoice& choice) {
  const uint64_t more_bytes = std::min(choice.state_bytes, kMostDemandBytes);
  limits.limit_bytes = std::min(limits.limit_bytes, kMostDemandBytes) + more_bytes;
  limits.unmoved_bytes = std::min(limits.unmoved_bytes, kMostDemandBytes) + more_bytes;
  return limits;
}

std::vector<StepChoice> choose_steps(const StepRecord& record, const StepLimits& limits,
                                     const std::vector<Block>& blocks) {
  return Chooser(record, limits, blocks).choose();
}

StepChoice choose_forced(const StepRecord& record, const StepLimits& limits, const std::vector<Block>& blocks,
                         const ForcedChoice& forced) {
  std::vector<Block> taken;
  std::copy_if(blocks.begin(), blocks.end(), std::back_inserter(taken),
               [&](const Block& block) { return forced.recomputed.contains(record.calls[block.call].name); });
  return make_choice(record, limits, std::move(taken), std::min(forced.state_bytes, limits.state_bytes));
}

}  // namespace ebbtide::policy
