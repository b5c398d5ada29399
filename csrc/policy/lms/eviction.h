#pragma once

#include <cstddef>
#include <cstdint>
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

}  // namespace ebbtide::policy
