#pragma once

#include "core/allocate/thread_policy.h"
#include "policy/reported_memory.h"

// The settings of the preload library, from the environment. Limits are the core's own variables. docs/preload.md lists
// all of them.
namespace ebbtide::preload {

// What happens to an allocation that does not fit the device. Only the preload library has kManaged: the core handles
// only memory that it places itself.
enum class OnShortage { kSplit, kManaged, kWhole, kFail };

struct Settings {
  OnShortage on_shortage = OnShortage::kSplit;
  policy::Report report = policy::Report::kDevice;
  bool tags_all = false;  // also what others than torch allocate
  ThreadPolicy program;   // of threads without a policy of their own
};

// Read at the first use. A malformed variable is reported in one line and then ignored.
const Settings& settings();

}  // namespace ebbtide::preload
