#include <utility>

#include "preload/allocate.h"
#include "preload/hook_call.h"

// Memory that stays the driver's and is counted.
using namespace ebbtide::preload;

// Never refused, since managed memory may be larger than any device. The part that fits the limit is counted.
EBBTIDE_HOOK_EXPORT CUresult cuMemAllocManaged(CUdeviceptr* address, size_t size_bytes, unsigned int flags) {
  return call_hook<&cuMemAllocManaged>(
      [&](auto native) {
        const Request request{.call = "cuMemAllocManaged", .device = current_device(), .size_bytes = size_bytes};
        if (address == nullptr || size_bytes == 0 || !is_countable(request.device)) return native();
        auto entry = charge(request);
        const CUresult result = native();
        if (result == CUDA_SUCCESS) forget_managed(*address);
        if (result == CUDA_SUCCESS && !entry.empty())
          keep_counted(counted_addresses(), *address, std::move(entry), request);
        return result;
      },
      address, size_bytes, flags);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size_bytes,
                                         const CUmemAllocationProp* properties, unsigned long long flags) {
  return call_hook<&cuMemCreate>(
      [&](auto native) {
        const bool is_on_device = properties != nullptr && properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
        if (handle == nullptr || size_bytes == 0 || !is_on_device || !is_countable(properties->location.id))
          return native();
        const Request request{.call = "cuMemCreate",
                              .device = properties->location.id,
                              .size_bytes = size_bytes,
                              .is_left_to_lms = is_left_to_lms()};
        const auto create_counted = [&](uint64_t spared_bytes) {
          auto entry = charge(request, spared_bytes);
          if (entry.empty()) return CUDA_ERROR_OUT_OF_MEMORY;
          auto margin = keep_margin(request);
          if (!margin) return CUDA_ERROR_OUT_OF_MEMORY;
          const CUresult result = native();
          margin.reset();
          if (result == CUDA_SUCCESS) keep_counted(counted_handles(), *handle, std::move(entry), request);
          return result;
        };
        // The whole handle would go to the host, so one larger than the room of small ones takes precedence over them.
        const uint64_t room_bytes = spared_for_small(request);
        const uint64_t spared_bytes = size_bytes <= room_bytes ? room_bytes : 0;
        if (const CUresult result = create_counted(spared_bytes); result != CUDA_ERROR_OUT_OF_MEMORY) return result;
        if (request.is_left_to_lms) return CUDA_ERROR_OUT_OF_MEMORY;
        const Overflowed done = create_on_host(request, *properties, handle);
        return spared_bytes > 0 && done.is_host_full ? create_counted(0) : done.result;
      },
      handle, size_bytes, properties, flags);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return call_hook<&cuMemRelease>(
      [&](auto native) {
        auto on_device = counted_handles().take(handle);
        auto on_host = host_handles().take(handle);
        const CUresult result = native();
        if (result != CUDA_SUCCESS) counted_handles().put_back(handle, std::move(on_device));
        if (result != CUDA_SUCCESS) host_handles().put_back(handle, std::move(on_host));
        return result;
      },
      handle);
}

// NCCL asks for the handles of buffers that it registers, and gives each back.
EBBTIDE_HOOK_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  return call_hook<&cuMemRetainAllocationHandle>(
      [&](auto native) {
        const CUresult result = native();
        if (result != CUDA_SUCCESS) return result;
        counted_handles().retain(*handle);
        host_handles().retain(*handle);
        return result;
      },
      handle, address);
}
