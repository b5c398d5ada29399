#include <utility>

#include "preload/allocate.h"
#include "preload/hook_call.h"
#include "preload/memory_map.h"

// Memory that stays the driver's and is counted.
using namespace ebbtide::preload;

EBBTIDE_HOOK_EXPORT CUresult cuMemAllocManaged(CUdeviceptr* address, size_t size_bytes, unsigned int flags) {
  return call_hook<&cuMemAllocManaged>(
      [&](auto native) {
        return allocate_managed_by_driver(
            {.call = "cuMemAllocManaged", .device = current_device(), .size_bytes = size_bytes}, address, native);
      },
      address, size_bytes, flags);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size_bytes,
                                         const CUmemAllocationProp* properties, unsigned long long flags) {
  return call_hook<&cuMemCreate>(
      [&](auto native) {
        return create({.call = "cuMemCreate", .size_bytes = size_bytes}, properties, handle, native);
      },
      handle, size_bytes, properties, flags);
}

EBBTIDE_HOOK_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return call_hook<&cuMemRelease>(
      [&](auto native) {
        auto on_device = records().handles.take(handle);
        auto on_host = records().host_handles.take(handle);
        const CUresult result = native();
        if (result != CUDA_SUCCESS) records().handles.put_back(handle, std::move(on_device));
        if (result != CUDA_SUCCESS) records().host_handles.put_back(handle, std::move(on_host));
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
        records().handles.retain(*handle);
        records().host_handles.retain(*handle);
        return result;
      },
      handle, address);
}
