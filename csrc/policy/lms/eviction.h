#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

// Which saved tensors leave the device when memory is short. Used by the torch extension as well: standard C++ only.
namespace ebbtide::policy {

struct Evictable {
  uint64_t size_bytes;
  uint64_t next_use;  // an order: what is used later has the larger number
};

// Indices of what is to leave so that wanted_bytes become free: first what is used farthest in the future, without
// those that turn out not to be needed. All of them if they do not suffice.
std::vector<size_t> choose_evictions(const std::vector<Evictable>& candidates, uint64_t wanted_bytes);

// The one whose memory serves an allocation of wanted_bytes in one piece with the least left over: of those that leave
// an eighth at most, the one that is used farthest in the future.
std::optional<size_t> choose_fitting(const std::vector<Evictable>& candidates, uint64_t wanted_bytes);

}  // namespace ebbtide::policy
