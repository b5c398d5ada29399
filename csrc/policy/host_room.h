#pragma once

#include <cstdint>
#include <vector>

#include "base/bytes.h"

// How much host memory ebbtide may still take. Pure: numbers in, number out. All in bytes.
namespace ebbtide::policy {

// One memory cgroup above this process.
struct CgroupLevel {
  uint64_t limit_bytes = kUnlimited;
  uint64_t used_bytes = 0;
  uint64_t reclaimable_bytes = 0;  // page cache in used_bytes that the kernel gives up by itself
};

struct HostMemory {
  uint64_t total_bytes = 0;      // MemTotal
  uint64_t available_bytes = 0;  // MemAvailable
  std::vector<CgroupLevel> cgroups;
};

// The memory that ebbtide holds, by how the kernel accounts for it.
struct HostHoldings {
  uint64_t promised_bytes = 0;   // reserved, not touched yet: the kernel does not know of it
  uint64_t touched_bytes = 0;    // anonymous pages: the kernel counts them
  uint64_t uncharged_bytes = 0;  // pinned by the driver: out of MemAvailable, but charged to no cgroup
};

HostHoldings sum(const HostHoldings& a, const HostHoldings& b);
uint64_t total(const HostHoldings& holdings);

struct HostRules {
  uint64_t limit_bytes = kUnlimited;  // host_limit
  uint64_t margin_bytes = 0;          // host_margin
};

// The smallest of the amounts that RAM, each cgroup and host_limit leave.
uint64_t host_room(const HostMemory& memory, const HostHoldings& holdings, const HostRules& rules);

// The source of the smallest limit among RAM, the cgroups and host_limit, for messages.
uint64_t host_limit_in_force(const HostMemory& memory, const HostRules& rules);

// min(1 GiB, a sixteenth of the memory that the process may use).
uint64_t default_host_margin(const HostMemory& memory);

}  // namespace ebbtide::policy
