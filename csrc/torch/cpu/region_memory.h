// The one arena of the process, over ebbtide's slots, and the fork rule: a child shares its parent's pages, so
// there it takes and gives back nothing.
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

// "tag 'weights'", as well as it is known.
std::string describe(const Pool& pool);
// What to tell who asked for request_bytes in vain: what there is, and what to do.
std::string out_of_memory_message(const Pool& pool, uint64_t request_bytes);

}  // namespace ebbtide::cpu
