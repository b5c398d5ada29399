#include "core/operation/ahead.h"

#include <utility>

#include "base/error.h"
#include "core/operation/operation.h"
#include "driver/context.h"

namespace ebbtide {

std::optional<Report> copy_ahead(Core& core, const std::string& tag, AheadProgress& progress, AddressRanges unused) {
  OperationRequest request;
  request.tags.names = {tag};
  request.ahead = &progress;
  // Memory that is used since is copied by the pause: here it does no harm to be out of date.
  request.unused = std::move(unused);
  request.unused_as_of = UINT64_MAX;
  // Captures that ebbtide does not know of stay whole (F20): a thread of ebbtide's may copy, at a moment that the
  // program did not choose.
  const RelaxedCaptureMode relaxed;
  try {
    return std::move(Operation::claim(core, OperationKind::kCopyAhead, std::move(request))->commit().front());
  } catch (const CaptureError&) {
    return std::nullopt;
  }
}

}  // namespace ebbtide
