#pragma once

#include <atomic>
#include <cstdint>

namespace ebbtide {

// Counters since the start, for the statistics.
struct Counters {
#define EBBTIDE_COUNTER(name) std::atomic<uint64_t> name{0};
#include "core/state/counters.def"
#undef EBBTIDE_COUNTER
  // True for the first spill of the process, which is logged.
  bool note_spill(uint64_t host_bytes) {
    bytes_spilled += host_bytes;
    return spills++ == 0;
  }
};

}  // namespace ebbtide
