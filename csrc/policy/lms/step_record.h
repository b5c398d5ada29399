#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// What a training step saves for backward, when, and in which calls of modules. Used by the torch extension as well:
// standard C++ only.
namespace ebbtide::policy {

inline constexpr uint32_t kNone = UINT32_MAX;

enum class StepEventKind : uint8_t {
  kSaved,     // autograd saved the storage for the first time
  kFree,      // from here on only the graph refers to it: a copy may begin, and it may leave
  kWanted,    // the program reads it, so it must be on the device until the next kFree
  kDropped,   // the graph gave it up: the storage is gone
  kEntered,   // the call of a module begins
  kReturned,  // and ends
};

inline bool is_of_call(StepEventKind kind) {
  return kind == StepEventKind::kEntered || kind == StepEventKind::kReturned;
}

// Whether such events have a name by which they are found again in other steps.
inline bool has_anchor(StepEventKind kind) { return kind != StepEventKind::kFree && kind != StepEventKind::kDropped; }

// Whether the device is asked when it comes to such events. The times of others are put between those.
inline bool is_marked(StepEventKind kind) { return is_of_call(kind) || kind == StepEventKind::kWanted; }

struct StepEvent {
  StepEventKind kind = StepEventKind::kSaved;
  uint32_t index = 0;  // into storages, or for kEntered and kReturned into calls
  // The most device memory that would be in use from this event to the next one if nothing had left the device.
  uint64_t demand_bytes = 0;
  double seconds = 0;  // since the step began, without the time in which it waited for copies
};

// A call of a module, in the order of their beginnings: calls inside it follow it.
struct ModuleCall {
  uint64_t key = 0;   // the module, and how many calls of it came before in this step: the same in each step
  uint64_t name = 0;  // as the key, and the same in each run of a program
  uint64_t module = 0;
  uint64_t kind = 0;        // equal for modules that are built alike
  uint32_t parent = kNone;  // the call around it
  uint32_t entered_at = 0;  // events
  uint32_t returned_at = kNone;
  uint64_t input_bytes = 0;        // of its arguments' storages that may leave
  uint64_t saved_input_bytes = 0;  // of those that the graph saves
};

struct RecordedStorage {
  uint64_t size_bytes = 0;
  uint64_t key = 0;           // the call and the order within it: the same in each step
  uint32_t call = kNone;      // the innermost call around all that saved it
  uint32_t input_of = kNone;  // the outermost call that got it as an argument
  bool stays = false;         // no plan evicts it
};

// The innermost call around one save of a storage.
struct SaveInCall {
  uint32_t storage = 0;
  uint32_t call = 0;
};

struct StepRecord {
  std::vector<RecordedStorage> storages;  // in the order of their first save
  std::vector<ModuleCall> calls;
  std::vector<SaveInCall> saves;  // without those outside all calls
  std::vector<StepEvent> events;
};

// The times of some events, ascending, as a device measured them: those of events between are moved accordingly, and
// those outside get the nearest one. Others than events of the record are ignored.
void set_times(StepRecord& record, const std::vector<std::pair<uint32_t, double>>& seconds_of_events);

// Models repeat blocks that are built alike, and some of them had to wait, for memory or for a copy. So each interval
// between two marked events becomes as long as the shortest ones that are alike.
void use_typical_times(StepRecord& record);

// A longer step is not recorded.
inline constexpr size_t kMostStepEvents = size_t{1} << 20;
// Larger numbers make no sense. Sums of these do not overflow.
inline constexpr uint64_t kMostStorageBytes = uint64_t{1} << 41;
inline constexpr uint64_t kMostDemandBytes = uint64_t{1} << 50;

}  // namespace ebbtide::policy
