#include <utility>

#include "base/bytes.h"
#include "preload/allocate.h"
#include "preload/hook_call.h"
#include "preload/managed_memory.h"
#include "preload/memory_map.h"
#include "preload/placed_memory.h"

// Memory that the program allocates and frees: at once, or in the order of a stream. The driver's pools serve
// stream-ordered memory first. Memory from ebbtide is available at once, and freed when the device has finished all its
// work.
using namespace ebbtide::preload;

namespace {

// The driver's pitch on every device so far: rows that begin at multiples of it are copied at full speed.
constexpr size_t kPitch = 512;

template <auto kFunction, typename... Arguments>
CUresult allocate_in_stream(CUstream stream, CUdeviceptr* address, size_t size_bytes, Arguments... arguments) noexcept {
  return call_hook<kFunction>(
      [&](auto native) {
        const Request request{.call = kCall<kFunction>,
                              .device = current_device(),
                              .size_bytes = size_bytes,
                              .stream = stream_of<kFunction>(stream),
                              .is_in_stream = true};
        return allocate(request, address, native);
      },
      address, size_bytes, arguments...);
}

CUresult free_counted(CUdeviceptr address, const Native& native) {
  auto entry = records().addresses.take(address);
  const CUresult result = native();
  if (result != CUDA_SUCCESS && !entry.empty()) records().addresses.keep(address, std::move(entry));
  return result;
}

template <auto kFunction>
CUresult free_in_stream(CUdeviceptr address, CUstream given) noexcept {
  return call_hook<kFunction>(
      [&](auto native) {
        const CUstream stream = stream_of<kFunction>(given);
        const auto placed = find_placed(address);
        if ((placed && placed->start == address) || is_managed(address)) {
          // As the driver refuses what no graph has allocated.
          if (is_capturing(stream)) return CUDA_ERROR_INVALID_VALUE;
          if (free_placed(address)) return CUDA_SUCCESS;
        }
        if (const auto result = free_managed(address)) return *result;
        return is_capturing(stream) ? native() : free_counted(address, native);
      },
      address, given);
}

}  // namespace

EBBTIDE_HOOK_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t size_bytes) {
  return call_hook<&cuMemAlloc_v2>(
      [&](auto native) {
        return allocate({.call = "cuMemAlloc", .device = current_device(), .size_bytes = size_bytes}, address, native);
      },
      address, size_bytes);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr* address, size_t* pitch, size_t width_bytes, size_t height,
                                                unsigned int element_bytes) {
  return call_hook<&cuMemAllocPitch_v2>(
      [&](auto native) {
        const bool is_element = element_bytes == 4 || element_bytes == 8 || element_bytes == 16;
        const size_t row_bytes = ebbtide::round_up(width_bytes, kPitch);
        size_t size_bytes = 0;
        if (pitch == nullptr || !is_element || __builtin_mul_overflow(row_bytes, height, &size_bytes)) return native();
        bool is_native = false;
        const CUresult result =
            allocate({.call = "cuMemAllocPitch", .device = current_device(), .size_bytes = size_bytes}, address, [&] {
              const CUresult answer = native();
              is_native = answer == CUDA_SUCCESS;
              return answer;
            });
        if (result == CUDA_SUCCESS && !is_native) *pitch = row_bytes;
        return result;
      },
      address, pitch, width_bytes, height, element_bytes);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
  return call_hook<&cuMemFree_v2>(
      [&](auto native) {
        if (address == 0) return native();
        if (free_placed(address)) return CUDA_SUCCESS;
        if (const auto result = free_managed(address)) return *result;
        return free_counted(address, native);
      },
      address);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemAllocAsync(CUdeviceptr* address, size_t size_bytes, CUstream stream) {
  return allocate_in_stream<&cuMemAllocAsync>(stream, address, size_bytes, stream);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr* address, size_t size_bytes, CUstream stream) {
  return allocate_in_stream<&cuMemAllocAsync_ptsz>(stream, address, size_bytes, stream);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr* address, size_t size_bytes, CUmemoryPool pool,
                                                     CUstream stream) {
  return allocate_in_stream<&cuMemAllocFromPoolAsync>(stream, address, size_bytes, pool, stream);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr* address, size_t size_bytes, CUmemoryPool pool,
                                                          CUstream stream) {
  return allocate_in_stream<&cuMemAllocFromPoolAsync_ptsz>(stream, address, size_bytes, pool, stream);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  return free_in_stream<&cuMemFreeAsync>(address, stream);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream) {
  return free_in_stream<&cuMemFreeAsync_ptsz>(address, stream);
}
