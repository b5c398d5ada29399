#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

// When weights will be used again, as far as the order of their earlier uses tells. Used by the torch extension as
// well: standard C++ only. Not thread-safe.
//
// Programs repeat themselves. Each use is looked up among the earlier ones: what followed it then is expected to follow
// it now, as long as it does.
namespace ebbtide::policy {

class UseOrder {
 public:
  // The unit is used now. Uses of one unit without another unit in between count once.
  void used(uint64_t unit);
  // How many uses of other units are expected before the next use of this one; nothing where earlier uses do not tell.
  std::optional<uint64_t> next_use(uint64_t unit) const;
  // How many uses there were since the unit was used last; nothing for one that was never used.
  std::optional<uint64_t> last_use(uint64_t unit) const;
  bool is_empty() const { return history_.empty(); }

 private:
  void forget_oldest();

  std::vector<uint64_t> history_;
  std::unordered_map<uint64_t, std::vector<size_t>> positions_;  // of each unit in the history, ascending
  std::optional<size_t> expected_;                               // where in the history the next use was before
};

// The order of `Evictable::next_use` for units of weights: what is expected latest has the largest number. Units that
// were never used come last of all, since nothing tells that they will be. Where the order of the next uses is unknown,
// backward wants units in the reverse order of their last uses, and the next forward in the same order.
uint64_t eviction_order(const UseOrder& order, uint64_t unit, bool expects_backward);

}  // namespace ebbtide::policy
