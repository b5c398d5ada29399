#include "policy/copy_plan.h"

#include <algorithm>

namespace ebbtide::policy {
namespace {

CopyPlan plan(const CopyNeed& need, bool is_fresh) {
  const int by_cores = is_fresh ? need.cores : std::min(need.cores, kMaxThreadsWithoutClearing);
  const int most = std::clamp(need.wanted_threads > 0 ? need.wanted_threads : by_cores, 1, kMaxCopyThreads);
  const CopyPlan large = {most, kLargeSlotBytes, kSlotsPerThread};
  // Of fewer bytes no thread would have enough pieces to keep both of its slots busy.
  if (!is_fresh && !need.is_shared && need.bytes >= large.ring_bytes()) return large;
  const uint64_t useful = need.bytes / (kSmallSlotBytes * kSlotsPerThread) + 1;
  return {static_cast<int>(std::min<uint64_t>(useful, static_cast<uint64_t>(most))), kSmallSlotBytes, kSlotsPerThread};
}

}  // namespace

uint64_t wanted_ring_bytes(const CopyNeed& need) {
  return std::max(plan(need, true).ring_bytes(), plan(need, false).ring_bytes());
}

CopyPlan plan_copy(const CopyNeed& need, uint64_t ring_bytes) {
  CopyPlan chosen = plan(need, need.fresh_bytes > need.bytes / 2);
  if (chosen.ring_bytes() <= ring_bytes) return chosen;
  chosen.slot_bytes = kSmallSlotBytes;
  if (chosen.ring_bytes() <= ring_bytes) return chosen;
  const uint64_t slots = std::max<uint64_t>(ring_bytes / kSmallSlotBytes, 1);
  chosen.threads = static_cast<int>(std::max<uint64_t>(slots / kSlotsPerThread, 1));
  chosen.slots_per_thread = slots == 1 ? 1 : kSlotsPerThread;
  return chosen;
}

}  // namespace ebbtide::policy
