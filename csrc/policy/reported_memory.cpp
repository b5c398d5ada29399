#include "policy/reported_memory.h"

#include <algorithm>

namespace ebbtide::policy {

MemoryNumbers report_memory(const ReportFacts& facts, Report report) {
  MemoryNumbers told = facts.driver;
  if (facts.limit_bytes != kUnlimited) {
    told.total_bytes = std::min(told.total_bytes, facts.limit_bytes);
    told.free_bytes = std::min(told.free_bytes, saturating_subtract(facts.limit_bytes, facts.held_bytes));
  }
  if (report == Report::kTotal) {
    told.total_bytes = saturating_add(told.total_bytes, facts.host_share_bytes);
  }
  if (report != Report::kDevice) {
    const uint64_t before_spill_bytes = saturating_subtract(told.free_bytes, facts.reserve_bytes);
    // An allocation that fits the device need not spill, and may use the reserve.
    told.free_bytes = std::max(told.free_bytes, saturating_add(before_spill_bytes, facts.host_available_bytes));
  }
  told.free_bytes = std::min(told.free_bytes, told.total_bytes);
  return told;
}

}  // namespace ebbtide::policy
