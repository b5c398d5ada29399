#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/memory/address_ranges.h"
#include "core/registry/registry.h"

namespace ebbtide {

// What the caller of an operation asks for. Each kind reads what concerns it.
struct OperationRequest {
  TagRequest tags;
  TagRequest resume_tags;                                        // swap: what comes back; tags is what leaves
  std::optional<BackupKind> backup;                              // pause: instead of each allocation's policy
  std::map<std::string, BackupKind, std::less<>> backup_by_tag;  // pause: instead of both, for these tags
  std::shared_ptr<Moved> moved;                                  // pause: filled with what has moved
  std::optional<bool> retain;                                    // resume: instead of each allocation's policy
  // pause, resume: nobody uses what lies in them, as of the moment when lease number unused_as_of was the newest.
  // Ignored where a tag was leased after that.
  AddressRanges unused;
  uint64_t unused_as_of = 0;
  // demote: no more device memory than this leaves. promote: no more is taken on each device.
  uint64_t max_bytes = kUnlimited;
  bool keeps_host = false;          // promote: the host memory is kept beside the device's, as long as there is room
  std::vector<AddressRange> order;  // resume: what comes first; the rest follows in the order of allocation
};

}  // namespace ebbtide
