#include "policy/lms/eviction.h"

#include <algorithm>
#include <numeric>

namespace ebbtide::policy {

std::vector<size_t> choose_evictions(const std::vector<Evictable>& candidates, uint64_t wanted_bytes) {
  std::vector<size_t> order(candidates.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t left, size_t right) { return candidates[left].next_use > candidates[right].next_use; });
  std::vector<size_t> chosen;
  uint64_t freed_bytes = 0;
  for (const size_t index : order) {
    if (freed_bytes >= wanted_bytes) break;
    chosen.push_back(index);
    freed_bytes += candidates[index].size_bytes;
  }
  // The last one may be large enough to spare earlier ones. What is used soonest is spared first.
  for (size_t position = chosen.size(); position-- > 0;) {
    const uint64_t size_bytes = candidates[chosen[position]].size_bytes;
    if (freed_bytes < size_bytes || freed_bytes - size_bytes < wanted_bytes) continue;
    freed_bytes -= size_bytes;
    chosen.erase(chosen.begin() + static_cast<std::ptrdiff_t>(position));
  }
  return chosen;
}

}  // namespace ebbtide::policy
