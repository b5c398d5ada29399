#pragma once

#include <cstdint>

#include "base/bytes.h"

// The amount of device memory that a program sees.
namespace ebbtide::policy {

// kDevice: the true numbers. kFree: free memory grows by the host memory that spills may still take, up to the total,
// for programs that place data by the amount of free memory. kTotal: both numbers grow, for programs that size
// themselves by the total and are to use the host's share too.
enum class Report { kDevice, kFree, kTotal };

struct MemoryNumbers {
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
};

struct ReportFacts {
  MemoryNumbers driver;               // as the driver reports
  uint64_t limit_bytes = kUnlimited;  // device_limit, which makes the device small
  uint64_t held_bytes = 0;            // of that limit
  uint64_t reserve_bytes = 0;         // of the device, which a spill leaves free
  uint64_t host_available_bytes = 0;  // spills may still take this much
  // All host memory for spills, taken or not: a total must not change from one answer to the next.
  uint64_t host_share_bytes = 0;
};

// Free is never above total.
MemoryNumbers report_memory(const ReportFacts& facts, Report report);

}  // namespace ebbtide::policy
