#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

// A row of numbers to which ranges are added and in which small ones are found, each in logarithmic time.
namespace ebbtide::policy {

class RangeMinimum {
 public:
  explicit RangeMinimum(const std::vector<int64_t>& values)
      : leaves_(std::bit_ceil(std::max<size_t>(values.size(), 1))), nodes_(2 * leaves_, Node{INT64_MAX, 0}) {
    for (size_t index = 0; index < values.size(); ++index) nodes_[leaves_ + index].minimum = values[index];
    for (size_t node = leaves_; node-- > 1;) update(node);
  }

  void add(size_t begin, size_t end, int64_t amount) { add(1, 0, leaves_, begin, end, amount); }
  // The first index in [begin, end) whose number is below the bound, or end.
  size_t first_below(size_t begin, size_t end, int64_t bound) const {
    return find_first(1, 0, leaves_, begin, end, bound);
  }
  // The index after the last one in [begin, end) whose number is below the bound, or begin.
  size_t after_last_below(size_t begin, size_t end, int64_t bound) const {
    return find_last(1, 0, leaves_, begin, end, bound);
  }

 private:
  // The minimum of the node's range includes what was added to the whole range, and not what was added further up.
  struct Node {
    int64_t minimum;
    int64_t added;
  };

  void update(size_t node) {
    const int64_t least = std::min(nodes_[2 * node].minimum, nodes_[2 * node + 1].minimum);
    nodes_[node].minimum = least == INT64_MAX ? INT64_MAX : least + nodes_[node].added;
  }

  void add(size_t node, size_t low, size_t high, size_t begin, size_t end, int64_t amount) {
    if (begin >= high || end <= low || nodes_[node].minimum == INT64_MAX) return;
    if (begin <= low && high <= end) {
      nodes_[node].minimum += amount;
      nodes_[node].added += amount;
      return;
    }
    const size_t middle = (low + high) / 2;
    add(2 * node, low, middle, begin, end, amount);
    add(2 * node + 1, middle, high, begin, end, amount);
    update(node);
  }

  size_t find_first(size_t node, size_t low, size_t high, size_t begin, size_t end, int64_t bound) const {
    if (begin >= high || end <= low || nodes_[node].minimum >= bound) return end;
    if (high - low == 1) return low;
    const size_t middle = (low + high) / 2;
    const int64_t below = bound - nodes_[node].added;
    const size_t found = find_first(2 * node, low, middle, begin, end, below);
    return found != end ? found : find_first(2 * node + 1, middle, high, begin, end, below);
  }

  size_t find_last(size_t node, size_t low, size_t high, size_t begin, size_t end, int64_t bound) const {
    if (begin >= high || end <= low || nodes_[node].minimum >= bound) return begin;
    if (high - low == 1) return low + 1;
    const size_t middle = (low + high) / 2;
    const int64_t below = bound - nodes_[node].added;
    const size_t found = find_last(2 * node + 1, middle, high, begin, end, below);
    return found != begin ? found : find_last(2 * node, low, middle, begin, end, below);
  }

  size_t leaves_;
  std::vector<Node> nodes_;
};

}  // namespace ebbtide::policy
