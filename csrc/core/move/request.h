#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "core/memory/address_ranges.h"
#include "core/registry/registry.h"

namespace ebbtide {

// How far copies ahead of a pause have come in one tag: in the order of its allocations, a step at a time.
struct AheadProgress {
  static constexpr uint64_t kLeastStepBytes = 2 * kMiB;
  uint64_t step_bytes = 32 * kMiB;  // one step copies about this much
  int threads = 0;                  // for one step; 0: as many as a pause uses
  uint64_t next_sequence = 0;       // the allocation with which the next step begins
  size_t next_offset = 0;           // in it
  bool is_over = false;             // nothing is left
};

class Move;
struct Core;

// The request for an operation. Each kind reads the fields that concern it.
struct OperationRequest {
  TagRequest tags;
  TagRequest resume_tags;                                        // swap: the returning side; tags is the leaving one
  std::optional<BackupKind> backup;                              // pause: instead of each allocation's policy
  std::map<std::string, BackupKind, std::less<>> backup_by_tag;  // pause: instead of both, for these tags
  std::shared_ptr<PausedSet> paused_set;                         // pause: gets the allocations that moved
  std::optional<bool> retain;                                    // resume: instead of each allocation's policy
  // pause, resume: ranges that were not in use at the moment when lease number unused_as_of was the newest.
  // Ignored where a tag was leased after that.
  AddressRanges unused;
  uint64_t unused_as_of = 0;
  // demote: no more device memory than this leaves. promote: no more is taken on each device.
  uint64_t max_bytes = kUnlimited;
  bool keeps_host = false;          // promote: the host memory is kept beside the device's, as long as there is room
  AheadProgress* ahead = nullptr;   // copy ahead: where to begin, and afterwards where to go on; outlives the operation
  std::vector<AddressRange> order;  // resume: these come first; the rest follows in the order of allocation
  // Called once everything is ready to move, with the tags held: other processes let go of the memory. False: nothing
  // moves.
  std::function<bool()> before_moving;
  // In place of the move of this kind.
  std::function<std::unique_ptr<Move>(Core&, const OperationRequest&)> make_move;
};

}  // namespace ebbtide
