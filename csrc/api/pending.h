#pragma once

#include <memory>

#include "api/ebbtide.h"
#include "core/operation/pending.h"

namespace ebbtide::api {

// A handle for an asynchronous resume.
ebbtide_pending* hand_out_pending(std::shared_ptr<PendingResume> pending);
// A handle for its report.
ebbtide_report* hand_out_report(Report report);

}  // namespace ebbtide::api
