#include "policy/copy_plan.h"

#include <algorithm>

namespace ebbtide::policy {

int copy_threads(uint64_t bytes, int usable_cores, int wanted) {
  const int most = wanted > 0 ? wanted : std::max(1, usable_cores - (usable_cores > 4 ? 2 : 0));
  const uint64_t pieces = bytes / (kSlotBytes * kSlotsPerThread) + 1;
  return static_cast<int>(std::clamp<uint64_t>(pieces, 1, static_cast<uint64_t>(std::clamp(most, 1, kMaxCopyThreads))));
}

}  // namespace ebbtide::policy
