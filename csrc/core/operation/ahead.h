#pragma once

#include <optional>
#include <string>

#include "core/move/move.h"

namespace ebbtide {

// One step of copies ahead of a pause of the tag, from where progress says; it is moved on. None, with nothing done,
// where a capture is under way. unused: ranges that were not in use when the copies began. Throws StateError for an
// unknown tag, StoreError, DriverError.
std::optional<Report> copy_ahead(Core& core, const std::string& tag, AheadProgress& progress,
                                 AddressRanges unused = {});

}  // namespace ebbtide
