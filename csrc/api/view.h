#pragma once

#include <cstddef>

#include "api/ebbtide.h"
#include "core/operation.h"

// Between the structs of ebbtide.h and the core's.
namespace ebbtide::api {

Policy read_policy(const ebbtide_policy* policy);  // null: the default
OperationRequest read_request(const ebbtide_request* request);
ebbtide_allocation_info describe(const Allocation& allocation);

// The sizes of the structs in the first version of ebbtide.h, up to the end of their last field: what every caller has.
#define EBBTIDE_LEAST(type, last) (offsetof(type, last) + sizeof(type::last))
inline constexpr size_t kLeastPolicy = EBBTIDE_LEAST(ebbtide_policy, backup);
inline constexpr size_t kLeastRequest = EBBTIDE_LEAST(ebbtide_request, address_count);
inline constexpr size_t kLeastLease = EBBTIDE_LEAST(ebbtide_lease, is_away);
inline constexpr size_t kLeastDeviceInfo = EBBTIDE_LEAST(ebbtide_device_info, limit_bytes);
inline constexpr size_t kLeastAllocationInfo = EBBTIDE_LEAST(ebbtide_allocation_info, tag);
inline constexpr size_t kLeastReportTotals = EBBTIDE_LEAST(ebbtide_report_totals, seconds);
inline constexpr size_t kLeastStats = EBBTIDE_LEAST(ebbtide_stats, deferred_undos);
#undef EBBTIDE_LEAST

}  // namespace ebbtide::api
