// Queries about pointers.
#include <cstring>

#include "sim/entry.h"
#include "sim/simulator.h"

namespace ebbtide::sim {
namespace {

struct PointerFacts {
  CUmemorytype type;
  uint64_t start;
  uint64_t size;
  int device;
  uint64_t context;
  bool is_managed = false;
};

// Nothing if the driver does not know the pointer.
std::optional<PointerFacts> facts_of(uint64_t address) {
  const AddressSpace& space = simulator().address_space;
  if (const auto mapping = space.find_mapping(address)) {
    const PhysicalBlock& block = *mapping->second->block;
    const auto reservation = space.find_reservation(address);
    const auto& linear = reservation->second->linear;
    const bool is_managed = linear && linear->is_managed;
    const bool is_on_device = block.is_on_device() || is_managed;
    return PointerFacts{is_on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST,
                        linear ? reservation->first : mapping->first,
                        linear ? linear->requested_bytes : mapping->second->size,
                        block.is_on_device() ? block.location.id : 0,
                        linear ? linear->context : 0,
                        is_managed};
  }
  if (const auto pinned = simulator().host_memory.find(address)) {
    return PointerFacts{CU_MEMORYTYPE_HOST, pinned->first, pinned->second.size, 0, pinned->second.context};
  }
  return std::nullopt;
}

template <typename T>
CUresult answer(void* data, T value) {
  *static_cast<T*>(data) = value;
  return CUDA_SUCCESS;
}

CUresult pointer_attribute(void* data, CUpointer_attribute attribute, CUdeviceptr ptr) {
  if (data == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  const auto facts = facts_of(ptr);
  if (!facts) {
    if (attribute == CU_POINTER_ATTRIBUTE_MAPPED) return answer<int>(data, 0);
    return CUDA_ERROR_INVALID_VALUE;
  }
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: return answer<CUcontext>(data, handle_of<CUcontext>(facts->context));
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: return answer<unsigned int>(data, facts->type);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: return answer<CUdeviceptr>(data, ptr);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      if (facts->type != CU_MEMORYTYPE_HOST) return CUDA_ERROR_INVALID_VALUE;
      return answer<uint64_t>(data, ptr);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: return answer<unsigned int>(data, facts->is_managed ? 1 : 0);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: return answer<int>(data, facts->device);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: return answer<CUdeviceptr>(data, facts->start);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: return answer<size_t>(data, facts->size);
    case CU_POINTER_ATTRIBUTE_MAPPED: return answer<int>(data, 1);
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult pointer_attributes(unsigned int numAttributes, CUpointer_attribute* attributes, void** data, CUdeviceptr ptr) {
  if (numAttributes == 0 || attributes == nullptr || data == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (unsigned int i = 0; i < numAttributes; ++i) {
    if (pointer_attribute(data[i], attributes[i], ptr) == CUDA_SUCCESS) continue;
    if (data[i] == nullptr) return CUDA_ERROR_INVALID_VALUE;
    // An attribute that the driver cannot determine is not an error in this call.
    if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
      answer<int>(data[i], -2);
    } else if (attributes[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE || attributes[i] == CU_POINTER_ATTRIBUTE_IS_MANAGED) {
      answer<unsigned int>(data[i], 0);
    } else {
      answer<uint64_t>(data[i], 0);
    }
  }
  return CUDA_SUCCESS;
}

CUresult ipc_handle(CUipcMemHandle* pHandle, CUdeviceptr dptr) {
  if (pHandle == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  const auto reservation = simulator().address_space.find_reservation(dptr);
  if (!reservation || !reservation->second->linear || reservation->second->linear->is_managed)
    return CUDA_ERROR_INVALID_VALUE;
  *pHandle = {};
  std::memcpy(pHandle->reserved, &reservation->first, sizeof reservation->first);
  return CUDA_SUCCESS;
}

CUresult address_range(CUdeviceptr* pbase, size_t* psize, CUdeviceptr dptr) {
  Lock lock(simulator().mutex);
  const auto facts = facts_of(dptr);
  if (!facts) return CUDA_ERROR_NOT_FOUND;
  // The real driver returns base 0 for host memory behind a device address.
  if (pbase != nullptr) *pbase = facts->type == CU_MEMORYTYPE_HOST ? 0 : facts->start;
  if (psize != nullptr) *psize = facts->size;
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr ptr) {
  EBBTIDE_SIM_FORWARD(cuPointerGetAttribute, kDriver, pointer_attribute, data, attribute, ptr);
}

EBBTIDE_SIM_EXPORT CUresult cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute* attributes,
                                                   void** data, CUdeviceptr ptr) {
  EBBTIDE_SIM_FORWARD(cuPointerGetAttributes, kDriver, pointer_attributes, numAttributes, attributes, data, ptr);
}

EBBTIDE_SIM_EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle* pHandle, CUdeviceptr dptr) {
  EBBTIDE_SIM_FORWARD(cuIpcGetMemHandle, kContext, ipc_handle, pHandle, dptr);
}

EBBTIDE_SIM_EXPORT CUresult cuMemGetAddressRange(CUdeviceptr* pbase, size_t* psize, CUdeviceptr dptr) {
  EBBTIDE_SIM_FORWARD(cuMemGetAddressRange, kContext, address_range, pbase, psize, dptr);
}

EBBTIDE_SIM_PLAIN_NAME(cuMemGetAddressRange);
