#pragma once

#include <cuda.h>

#include <cstdint>
#include <utility>

#include "driver/context.h"
#include "preload/counted_memory.h"

// How a hook allocates: the driver's own memory where there is room, ours where there is none.
namespace ebbtide::preload {

struct Request {
  const char* call = "";
  int device = -1;
  uint64_t size_bytes = 0;
  CUstream stream = nullptr;  // only to see whether it captures
  bool is_in_stream =
      false;  // the memory comes in the order of `stream`: while that captures, it belongs to a graph and is left to the driver
};

// The device of the calling thread's context, or -1: then the driver says what is wrong.
int current_device() noexcept;
// An ordinal that budgets can count for; of others the driver says what is wrong.
inline bool is_countable(int device) noexcept { return device >= 0 && device < kMaxDevices; }
bool is_capturing(CUstream stream) noexcept;

// Steps of allocate(), below.
bool must_place(const Request& request);
CountedMemory::Entry claim(const Request& request);  // empty: the device limit does not allow it
CUresult refuse(const Request& request);             // out of memory, with a line on stderr
CUresult overflow(const Request& request, CUdeviceptr* address);

// address: filled on success. native: asks the driver, fills *address.
template <typename Native>
CUresult allocate(const Request& request, CUdeviceptr* address, Native&& native) {
  if (request.is_in_stream && is_capturing(request.stream)) return native();
  if (!must_place(request)) {
    auto entry = claim(request);
    if (!entry.empty()) {
      const CUresult result = native();
      if (result == CUDA_SUCCESS) counted_addresses().keep(*address, std::move(entry));
      if (result != CUDA_ERROR_OUT_OF_MEMORY) return result;
    }
  }
  return overflow(request, address);
}

}  // namespace ebbtide::preload
