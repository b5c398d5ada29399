#include "policy/lms/use_order.h"

#include <algorithm>

namespace ebbtide::policy {
namespace {

constexpr size_t kMostUses = size_t{1} << 16;
// Larger than any distance in the history.
constexpr uint64_t kUnknown = uint64_t{1} << 32;
constexpr uint64_t kNever = uint64_t{1} << 34;

}  // namespace

void UseOrder::used(uint64_t unit) {
  if (!history_.empty() && history_.back() == unit) return;
  if (history_.size() == kMostUses) forget_oldest();
  if (expected_ && history_[*expected_] == unit) {
    ++*expected_;
  } else {
    expected_.reset();
    const auto found = positions_.find(unit);
    if (found != positions_.end()) {
      // The latest use that came after the same unit as this one, or the latest of all.
      const auto& positions = found->second;
      const auto follows_same = [&](size_t position) {
        return position > 0 && history_[position - 1] == history_.back();
      };
      const auto same = std::find_if(positions.rbegin(), positions.rend(), follows_same);
      expected_ = (same != positions.rend() ? *same : positions.back()) + 1;
    }
  }
  positions_[unit].push_back(history_.size());
  history_.push_back(unit);
}

std::optional<uint64_t> UseOrder::next_use(uint64_t unit) const {
  const auto found = positions_.find(unit);
  if (!expected_ || found == positions_.end()) return std::nullopt;
  const auto next = std::lower_bound(found->second.begin(), found->second.end(), *expected_);
  if (next == found->second.end()) return std::nullopt;
  return *next - *expected_;
}

std::optional<uint64_t> UseOrder::last_use(uint64_t unit) const {
  const auto found = positions_.find(unit);
  if (found == positions_.end()) return std::nullopt;
  return history_.size() - 1 - found->second.back();
}

void UseOrder::forget_oldest() {
  const size_t dropped = kMostUses / 2;
  history_.erase(history_.begin(), history_.begin() + static_cast<std::ptrdiff_t>(dropped));
  positions_.clear();
  for (size_t position = 0; position < history_.size(); ++position) positions_[history_[position]].push_back(position);
  if (expected_) expected_ = *expected_ >= dropped ? std::optional<size_t>(*expected_ - dropped) : std::nullopt;
}

uint64_t eviction_order(const UseOrder& order, uint64_t unit, bool expects_backward) {
  if (const auto next = order.next_use(unit)) return *next;
  const auto last = order.last_use(unit);
  if (!last) return kNever;
  return expects_backward ? kUnknown + *last : kUnknown - *last;
}

}  // namespace ebbtide::policy
