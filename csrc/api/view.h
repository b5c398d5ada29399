#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "api/ebbtide.h"
#include "core/operation/operation.h"

// Conversions between the structs of ebbtide.h and those of the core.
namespace ebbtide::api {

Policy read_policy(const ebbtide_policy* policy);  // null: the default
BackupKind read_backup(int32_t value);             // throws InvalidArgument
OperationRequest read_request(const ebbtide_request* request);
void add_unused(OperationRequest& request, const OperationRequest& other);  // of a swap's other side
AddressRange read_range(const ebbtide_range& range);                        // throws InvalidArgument where it wraps
// Throws InvalidArgument if it is no handle.
std::shared_ptr<Moved> find_moved(const ebbtide_moved* moved);
ebbtide_report_row show_row(const std::string& tag, int device, const ReportRow& row);
ebbtide_allocation_info describe(const Allocation& allocation);

// The sizes of the structs in the first version of ebbtide.h, up to the end of their last field. Every caller has
// these.
#define EBBTIDE_LEAST(type, last) (offsetof(type, last) + sizeof(type::last))
inline constexpr size_t kLeastPolicy = EBBTIDE_LEAST(ebbtide_policy, retain);
inline constexpr size_t kLeastRequest = EBBTIDE_LEAST(ebbtide_request, order_count);
inline constexpr size_t kLeastLease = EBBTIDE_LEAST(ebbtide_lease, is_away);
inline constexpr size_t kLeastDeviceInfo = EBBTIDE_LEAST(ebbtide_device_info, limit_bytes);
inline constexpr size_t kLeastAllocationInfo = EBBTIDE_LEAST(ebbtide_allocation_info, tag);
inline constexpr size_t kLeastReportTotals = EBBTIDE_LEAST(ebbtide_report_totals, constant);
inline constexpr size_t kLeastTagInfo = EBBTIDE_LEAST(ebbtide_tag_info, host_bytes);
inline constexpr size_t kLeastStats = EBBTIDE_LEAST(ebbtide_stats, bytes_constant);
inline constexpr size_t kLeastThreadPolicy = EBBTIDE_LEAST(ebbtide_thread_policy, tag);
inline constexpr size_t kLeastAhead = EBBTIDE_LEAST(ebbtide_ahead, unused_count);
#undef EBBTIDE_LEAST

}  // namespace ebbtide::api
