#pragma once

#include <atomic>
#include <cstdint>

namespace ebbtide {

// What has happened so far, for the statistics.
struct Counters {
  std::atomic<uint64_t> alloc_calls{0}, free_calls{0}, alloc_failures{0}, pauses{0}, resumes{0}, operation_failures{0};
  std::atomic<uint64_t> bytes_paused{0}, bytes_resumed{0}, bytes_to_host{0}, bytes_to_device{0};
  std::atomic<uint64_t> bytes_clean{0}, bytes_unused{0}, bytes_constant{0};
  std::atomic<uint64_t> spills{0}, bytes_spilled{0}, bytes_promoted{0}, bytes_demoted{0};
  // True for the first spill of the process, which is logged.
  bool note_spill(uint64_t host_bytes) {
    bytes_spilled += host_bytes;
    return spills++ == 0;
  }
};

}  // namespace ebbtide
