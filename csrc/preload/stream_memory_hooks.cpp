#include <utility>

#include "preload/allocate.h"
#include "preload/hook_call.h"
#include "preload/managed_memory.h"
#include "preload/placed_memory.h"

// Stream-ordered memory. The driver's pools serve it first. Memory from ebbtide is available at once, and freed when
// the device has finished all its work.
using namespace ebbtide::preload;

namespace {

CUstream per_thread(CUstream stream) { return stream == nullptr ? CU_STREAM_PER_THREAD : stream; }

template <typename Native>
CUresult allocate_in_stream(const char* call, CUdeviceptr* address, size_t size_bytes, CUstream stream,
                            Native&& native) {
  const Request request{
      .call = call, .device = current_device(), .size_bytes = size_bytes, .stream = stream, .is_in_stream = true};
  if (address == nullptr || size_bytes == 0 || !is_countable(request.device)) return native();
  return allocate(request, address, native);
}

template <typename Native>
CUresult free_in_stream(CUdeviceptr address, CUstream stream, Native&& native) {
  const auto placed = find_placed(address);
  if ((placed && placed->start == address) || is_managed(address)) {
    // As the driver refuses what no graph has allocated.
    if (is_capturing(stream)) return CUDA_ERROR_INVALID_VALUE;
    if (free_placed(address)) return CUDA_SUCCESS;
  }
  if (const auto result = free_managed(address)) return *result;
  if (is_capturing(stream)) return native();
  auto entry = counted_addresses().take(address);
  const CUresult result = native();
  if (result != CUDA_SUCCESS && !entry.empty()) counted_addresses().keep(address, std::move(entry));
  return result;
}

}  // namespace

EBBTIDE_HOOK_EXPORT CUresult cuMemAllocAsync(CUdeviceptr* address, size_t size_bytes, CUstream stream) {
  return call_hook<&cuMemAllocAsync>(
      "cuMemAllocAsync",
      [&](auto real_function) {
        return allocate_in_stream("cuMemAllocAsync", address, size_bytes, stream,
                                  [&] { return real_function(address, size_bytes, stream); });
      },
      address, size_bytes, stream);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr* address, size_t size_bytes, CUstream stream) {
  return call_hook<&cuMemAllocAsync_ptsz>(
      "cuMemAllocAsync",
      [&](auto real_function) {
        return allocate_in_stream("cuMemAllocAsync", address, size_bytes, per_thread(stream),
                                  [&] { return real_function(address, size_bytes, stream); });
      },
      address, size_bytes, stream);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr* address, size_t size_bytes, CUmemoryPool pool,
                                                     CUstream stream) {
  return call_hook<&cuMemAllocFromPoolAsync>(
      "cuMemAllocFromPoolAsync",
      [&](auto real_function) {
        return allocate_in_stream("cuMemAllocFromPoolAsync", address, size_bytes, stream,
                                  [&] { return real_function(address, size_bytes, pool, stream); });
      },
      address, size_bytes, pool, stream);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr* address, size_t size_bytes, CUmemoryPool pool,
                                                          CUstream stream) {
  return call_hook<&cuMemAllocFromPoolAsync_ptsz>(
      "cuMemAllocFromPoolAsync",
      [&](auto real_function) {
        return allocate_in_stream("cuMemAllocFromPoolAsync", address, size_bytes, per_thread(stream),
                                  [&] { return real_function(address, size_bytes, pool, stream); });
      },
      address, size_bytes, pool, stream);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
  return call_hook<&cuMemFreeAsync>(
      "cuMemFreeAsync",
      [&](auto real_function) {
        return free_in_stream(address, stream, [&] { return real_function(address, stream); });
      },
      address, stream);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream) {
  return call_hook<&cuMemFreeAsync_ptsz>(
      "cuMemFreeAsync",
      [&](auto real_function) {
        return free_in_stream(address, per_thread(stream), [&] { return real_function(address, stream); });
      },
      address, stream);
}
