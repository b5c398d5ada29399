// The exported functions of address ranges and mappings.
#include <algorithm>

#include "sim/entry.h"
#include "sim/simulator.h"

namespace ebbtide::sim {
namespace {

CUresult reserve(CUdeviceptr* ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags) {
  if (ptr == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  uint64_t address = 0;
  const CUresult result = simulator().address_space.reserve(address, size, alignment, addr);
  if (result == CUDA_SUCCESS) *ptr = address;
  return result;
}

CUresult free_range(CUdeviceptr ptr, size_t size) {
  Lock lock(simulator().mutex);
  return simulator().address_space.free_range(ptr, size);
}

CUresult map(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long flags) {
  if (offset != 0) return CUDA_ERROR_NOT_SUPPORTED;
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  return simulator().address_space.map(ptr, size, simulator().physical.find(handle));
}

CUresult unmap(CUdeviceptr ptr, size_t size) {
  Lock lock(simulator().mutex);
  return simulator().address_space.unmap(ptr, size);
}

CUresult set_access(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc, size_t count) {
  Lock lock(simulator().mutex);
  for (size_t i = 0; desc != nullptr && i < count; ++i) {
    // The driver checks that the memory can be accessed from a host node, but never the node's number.
    const CUmemLocation& location = desc[i].location;
    const bool is_node = location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
    if (!is_node && simulator().physical.check_location(location) != CUDA_SUCCESS) return CUDA_ERROR_INVALID_VALUE;
  }
  return simulator().address_space.set_access(ptr, size, desc, count, simulator().peers);
}

CUresult get_access(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr ptr) {
  if (flags == nullptr || location == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  if (const CUresult wrong = simulator().physical.check_location(*location); wrong != CUDA_SUCCESS) return wrong;
  uint64_t found = 0;
  const CUresult result = simulator().address_space.get_access(found, {location->type, location->id}, ptr);
  if (result == CUDA_SUCCESS) *flags = found;
  return result;
}

CUresult retain_handle(CUmemGenericAllocationHandle* handle, void* addr) {
  if (handle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  const auto address = reinterpret_cast<uint64_t>(addr);
  const auto reservation = simulator().address_space.find_reservation(address);
  const auto mapping = simulator().address_space.find_mapping(address);
  if (!mapping || reservation->second->linear) return CUDA_ERROR_INVALID_VALUE;
  simulator().physical.retain(mapping->second->block);
  *handle = mapping->second->block->id;
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t alignment, CUdeviceptr addr,
                                                unsigned long long flags) {
  EBBTIDE_SIM_FORWARD(cuMemAddressReserve, kDriver, reserve, ptr, size, alignment, addr, flags);
}

EBBTIDE_SIM_EXPORT CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size) {
  EBBTIDE_SIM_FORWARD(cuMemAddressFree, kDriver, free_range, ptr, size);
}

EBBTIDE_SIM_EXPORT CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                                     unsigned long long flags) {
  EBBTIDE_SIM_FORWARD(cuMemMap, kDriver, map, ptr, size, offset, handle, flags);
}

EBBTIDE_SIM_EXPORT CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) {
  EBBTIDE_SIM_FORWARD(cuMemUnmap, kDriver, unmap, ptr, size);
}

EBBTIDE_SIM_EXPORT CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc, size_t count) {
  EBBTIDE_SIM_FORWARD(cuMemSetAccess, kDriver, set_access, ptr, size, desc, count);
}

EBBTIDE_SIM_EXPORT CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr ptr) {
  EBBTIDE_SIM_FORWARD(cuMemGetAccess, kDriver, get_access, flags, location, ptr);
}

EBBTIDE_SIM_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* addr) {
  EBBTIDE_SIM_FORWARD(cuMemRetainAllocationHandle, kDriver, retain_handle, handle, addr);
}
