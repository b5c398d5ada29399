#include "policy/host_room.h"

#include <algorithm>

namespace ebbtide::policy {

HostHoldings sum(const HostHoldings& a, const HostHoldings& b) {
  return {saturating_add(a.promised_bytes, b.promised_bytes), saturating_add(a.touched_bytes, b.touched_bytes),
          saturating_add(a.uncharged_bytes, b.uncharged_bytes)};
}

uint64_t total(const HostHoldings& holdings) {
  return saturating_add(saturating_add(holdings.promised_bytes, holdings.touched_bytes), holdings.uncharged_bytes);
}

uint64_t host_room(const HostMemory& memory, const HostHoldings& holdings, const HostRules& rules) {
  const uint64_t unseen_by_ram = saturating_add(holdings.promised_bytes, rules.margin_bytes);
  uint64_t room = saturating_subtract(memory.available_bytes, unseen_by_ram);
  const uint64_t unseen_by_cgroups = saturating_add(unseen_by_ram, holdings.uncharged_bytes);
  for (const CgroupLevel& level : memory.cgroups) {
    if (level.limit_bytes == kUnlimited) continue;
    const uint64_t used = saturating_subtract(level.used_bytes, level.reclaimable_bytes);
    room = std::min(room, saturating_subtract(level.limit_bytes, saturating_add(used, unseen_by_cgroups)));
  }
  if (rules.limit_bytes != kUnlimited) {
    room = std::min(room, saturating_subtract(rules.limit_bytes, total(holdings)));
  }
  return room;
}

uint64_t host_limit_in_force(const HostMemory& memory, const HostRules& rules) {
  uint64_t limit = std::min(memory.total_bytes, rules.limit_bytes);
  for (const CgroupLevel& level : memory.cgroups) limit = std::min(limit, level.limit_bytes);
  return limit;
}

uint64_t default_host_margin(const HostMemory& memory) {
  return std::min(kGiB, host_limit_in_force(memory, HostRules{}) / 16);
}

}  // namespace ebbtide::policy
