#pragma once

#include <cuda.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "core/allocate/thread_policy.h"
#include "core/budget/device_budget.h"
#include "core/budget/host_budget.h"
#include "driver/context.h"
#include "preload/managed_memory.h"
#include "preload/memory_map.h"

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

// The policy that the calling thread's allocation gets, by that of the thread, that of the program, and the caller.
std::optional<ThreadPolicy> choose_tag();

// Whether torch makes the call, and large model support makes room for it where memory is short.
bool is_left_to_lms();

// Steps of allocate_if_countable(), below.
bool must_place(const Request& request);
// The bytes of the device limit that a request that may overflow leaves to small ones.
uint64_t spared_for_small(const Request& request);
// Empty if the device limit does not allow it, or would have less than spared_bytes left.
CountedMemory::Entry charge(const Request& request, uint64_t spared_bytes = 0);
// Records what the driver has given for a charge.
void keep_counted(CountedMemory& memory, uint64_t key, CountedMemory::Entry entry, const Request& request) noexcept;
// None if the device would have less than device_margin left. Held until the driver has answered.
std::optional<DeviceMargin::Hold> keep_margin(const Request& request);
void note_full(const Request& request) noexcept;  // the driver has no room for it
CUresult refuse(const Request& request);          // out of memory, with a line on stderr
// As in the core, for memory that it places (Policy::flushes_first): torch is refused once, frees its cache, and asks
// again.
bool must_flush_first(const Request& request);
// Host memory for a request that does not fit this device; purpose is for the error. Throws StoreError.
HostCharge charge_host(int device, uint64_t size_bytes, const char* purpose);

struct Overflowed {
  CUresult result = CUDA_SUCCESS;
  bool is_host_full = false;  // the host is full, though the device may have room in its reserve or for small requests
};
Overflowed overflow(const Request& request, CUdeviceptr* address);

// Makes a handle for cuMemCreate on the host because the device had no room, and fills *handle on success. A handle
// can't be split between device and host: all of it goes to the host, whatever the policy.
Overflowed create_on_host(const Request& request, const CUmemAllocationProp& properties,
                          CUmemGenericAllocationHandle* handle);

// The driver's own memory, as far as the device limit allows.
template <typename Native>
CUresult allocate_counted(const Request& request, CUdeviceptr* address, uint64_t spared_bytes, Native&& native) {
  auto entry = charge(request, spared_bytes);
  if (entry.empty()) return CUDA_ERROR_OUT_OF_MEMORY;
  auto margin = keep_margin(request);
  if (!margin) return CUDA_ERROR_OUT_OF_MEMORY;
  const CUresult result = native();
  margin.reset();
  if (result == CUDA_ERROR_OUT_OF_MEMORY) note_full(request);
  if (result != CUDA_SUCCESS) return result;
  forget_managed(*address);
  keep_counted(counted_addresses(), *address, std::move(entry), request);
  return result;
}

// address: filled on success. native: asks the driver, fills *address; it alone answers what is malformed.
template <typename Native>
CUresult allocate_if_countable(Request request, CUdeviceptr* address, Native&& native) {
  if (address == nullptr || request.size_bytes == 0 || !is_countable(request.device)) return native();
  if (request.is_in_stream && is_capturing(request.stream)) return native();
  request.tagged_as = choose_tag();
  request.is_left_to_lms = !request.tagged_as && is_left_to_lms();
  const bool is_placed = must_place(request);
  const uint64_t spared_bytes = spared_for_small(request);
  if (!is_placed) {
    const CUresult result = allocate_counted(request, address, spared_bytes, native);
    if (result != CUDA_ERROR_OUT_OF_MEMORY) return result;
  }
  const Overflowed done = overflow(request, address);
  // What was to spare the device: the driver was not asked yet, or the limit not for all that it has.
  const bool is_spared = is_placed || spared_bytes > 0;
  return is_spared && done.is_host_full ? allocate_counted(request, address, 0, native) : done.result;
}

}  // namespace ebbtide::preload
