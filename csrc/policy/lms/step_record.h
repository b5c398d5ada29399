#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

// What a training step saves for backward, and when. Used by the torch extension as well: standard C++ only.
namespace ebbtide::policy {

enum class StepEventKind : uint8_t {
  kSaved,    // autograd saved the storage for the first time
  kFree,     // from here on only the graph refers to it: a copy may begin, and it may leave
  kWanted,   // the program reads it, so it must be on the device until the next kFree
  kDropped,  // the graph gave it up: the storage is gone
};

struct StepEvent {
  StepEventKind kind = StepEventKind::kSaved;
  uint32_t storage = 0;  // index into sizes_bytes
  // The most device memory that would be in use from this event to the next one if nothing had left the device.
  uint64_t demand_bytes = 0;
  double seconds = 0;  // since the step began, without the time in which it waited for copies
};

struct StepRecord {
  std::vector<uint64_t> sizes_bytes;  // of the storages, in the order of their first save
  std::vector<StepEvent> events;
};

// A longer step is not recorded.
inline constexpr size_t kMostStepEvents = size_t{1} << 20;

}  // namespace ebbtide::policy
