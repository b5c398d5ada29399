#pragma once

#include <memory>
#include <vector>

#include "api/ebbtide.h"
#include "core/operation/operation.h"

struct ebbtide_report {
  static constexpr const char* kName = "report";
  ebbtide::Report report;
};

// Conversions between the structs of ebbtide.h and those of the core. They throw InvalidArgument.
namespace ebbtide::api {

inline CUdeviceptr as_address(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

Policy read_policy(const ebbtide_policy* policy);  // null: the default
BackupKind read_backup(int32_t value);
OperationRequest read_request(const ebbtide_request* request);
AddressRange read_range(const ebbtide_range& range);
std::vector<AddressRange> read_ranges(const ebbtide_range* ranges, size_t count, const char* name);
std::shared_ptr<PausedSet> find_paused_set(const ebbtide_paused_set* set);
ebbtide_allocation_info describe(const Allocation& allocation);
// out may be null.
void hand_out_report(Report report, ebbtide_report** out);

}  // namespace ebbtide::api
