#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "core/allocate/thread_policy.h"
#include "core/budget/host_budget.h"
#include "driver/context.h"

// How a hook allocates: the driver's own memory if there is room, else ebbtide's.
namespace ebbtide::preload {

struct Request {
  const char* call = "";
  int device = -1;
  uint64_t size_bytes = 0;
  CUstream stream = nullptr;  // only to see whether it captures
  // The memory is ordered by `stream`. While that captures, it belongs to a graph and is left to the driver.
  bool is_in_stream = false;
  std::optional<ThreadPolicy> tagged_as{};  // none: the driver's own memory, and the host where that is short
  bool is_left_to_lms = false;              // torch's, for which large model support makes room: never on the host
};

// The device of the calling thread's context, or -1; the driver then reports the error.
int current_device() noexcept;
// Whether budgets can count for this ordinal; for others the driver reports the error.
inline bool is_countable(int device) noexcept { return device >= 0 && device < kMaxDevices; }
bool is_capturing(CUstream stream) noexcept;

// Asks the driver, which fills the address or handle; malformed calls are left to it.
using Native = std::function<CUresult()>;

// address: filled on success.
CUresult allocate(Request request, CUdeviceptr* address, const Native& native);
// The same for cuMemCreate. A handle can't be split between device and host: all of it goes to the host, whatever the
// policy.
CUresult create(Request request, const CUmemAllocationProp* properties, CUmemGenericAllocationHandle* handle,
                const Native& native);
// For cuMemAllocManaged. Never refused, since managed memory may be larger than any device. The part that fits the
// limit is counted.
CUresult allocate_managed_by_driver(const Request& request, CUdeviceptr* address, const Native& native);

// Host memory for a request that does not fit this device; purpose is for the error. Throws StoreError.
HostCharge charge_host(int device, uint64_t size_bytes, const char* purpose);
// Counts a spill; the first one is told on stderr in the words that where() gives.
void note_spill(int device, uint64_t size_bytes, const std::function<std::string()>& where) noexcept;

}  // namespace ebbtide::preload
