#include <utility>

#include "base/bytes.h"
#include "preload/allocate.h"
#include "preload/hook_call.h"
#include "preload/managed_memory.h"
#include "preload/placed_memory.h"

// Memory that is there when the call returns.
using namespace ebbtide::preload;

namespace {

// The driver's pitch on every device so far: rows that begin at multiples of it are copied at full speed.
constexpr size_t kPitch = 512;

}  // namespace

EBBTIDE_HOOK_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t size_bytes) {
  return call_hook<&cuMemAlloc_v2>(
      "cuMemAlloc",
      [&](auto real_function) {
        const auto native = [&] { return real_function(address, size_bytes); };
        const Request request{.call = "cuMemAlloc", .device = current_device(), .size_bytes = size_bytes};
        if (address == nullptr || size_bytes == 0 || !is_countable(request.device)) return native();
        return allocate(request, address, native);
      },
      address, size_bytes);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr* address, size_t* pitch, size_t width_bytes, size_t height,
                                                unsigned int element_bytes) {
  return call_hook<&cuMemAllocPitch_v2>(
      "cuMemAllocPitch",
      [&](auto real_function) {
        bool is_native = false;
        const auto native = [&] {
          const CUresult result = real_function(address, pitch, width_bytes, height, element_bytes);
          is_native = result == CUDA_SUCCESS;
          return result;
        };
        const bool is_element = element_bytes == 4 || element_bytes == 8 || element_bytes == 16;
        const size_t row_bytes = ebbtide::round_up(width_bytes, kPitch);
        size_t size_bytes = 0;
        const bool is_size = !__builtin_mul_overflow(row_bytes, height, &size_bytes) && size_bytes != 0;
        const Request request{.call = "cuMemAllocPitch", .device = current_device(), .size_bytes = size_bytes};
        if (address == nullptr || pitch == nullptr || !is_element || !is_size || !is_countable(request.device))
          return native();
        const CUresult result = allocate(request, address, native);
        if (result == CUDA_SUCCESS && !is_native) *pitch = row_bytes;
        return result;
      },
      address, pitch, width_bytes, height, element_bytes);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
  return call_hook<&cuMemFree_v2>(
      "cuMemFree",
      [&](auto real_function) {
        if (address == 0) return real_function(address);
        if (free_placed(address)) return CUDA_SUCCESS;
        if (const auto result = free_managed(address)) return *result;
        auto entry = counted_addresses().take(address);
        const CUresult result = real_function(address);
        if (result != CUDA_SUCCESS && !entry.empty()) counted_addresses().keep(address, std::move(entry));
        return result;
      },
      address);
}
