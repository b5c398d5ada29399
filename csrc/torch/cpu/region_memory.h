// The one arena of the process, over ebbtide's slots, and its rule for forks: a child shares its parent's pages, so it
// neither allocates nor frees region memory.
#pragma once

#include <cstdint>
#include <string>

#include "torch/cpu/pool.h"
#include "torch/cpu/routing.h"

namespace ebbtide::cpu {

struct RegionMemory {
  Arena& arena;
  Routing& routing;
};

// Made at the first call and leaked. Registers the fork handlers.
RegionMemory& region_memory();
bool is_forked_child();

// "tag 'weights'", or the slot if the tag is unknown.
std::string describe(const Pool& pool);
// The message for a failed request of request_bytes, for Python: how much there is, what refused, and what to do.
// Before the request, forget_refusal() was called in this thread.
void forget_refusal() noexcept;
std::string out_of_memory_message(const Pool& pool, uint64_t request_bytes);

}  // namespace ebbtide::cpu
