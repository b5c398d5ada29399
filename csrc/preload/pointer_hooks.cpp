#include <cstdint>

#include "base/log.h"
#include "driver/context.h"
#include "preload/hook_call.h"
#include "preload/placed_memory.h"

// Questions about a pointer. For the core's memory the driver's true answers would be ranges that end with a chunk, and
// host memory in between. A program must see one allocation on its device.
using namespace ebbtide::preload;

namespace {

template <typename Value>
void answer(void* data, Value value) {
  *static_cast<Value*>(data) = value;
}

// False for attributes that only the driver answers.
bool answer_attribute(void* data, CUpointer_attribute attribute, CUdeviceptr address, const PlacedMemory& memory) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: answer(data, ebbtide::primary_context(memory.device)); return true;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: answer<unsigned int>(data, CU_MEMORYTYPE_DEVICE); return true;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: answer(data, address); return true;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: answer<int>(data, memory.device); return true;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: answer(data, memory.start); return true;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: answer<size_t>(data, memory.size_bytes); return true;
    default: return false;
  }
}

}  // namespace

EBBTIDE_HOOK_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr* start, size_t* size_bytes, CUdeviceptr address) {
  return call_hook<&cuMemGetAddressRange_v2>(
      [&](auto native) {
        const auto memory = find_placed(address);
        if (!memory) return native();
        if (start != nullptr) *start = memory->start;
        if (size_bytes != nullptr) *size_bytes = memory->size_bytes;
        return CUDA_SUCCESS;
      },
      start, size_bytes, address);
}

EBBTIDE_HOOK_EXPORT CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  return call_hook<&cuPointerGetAttribute>(
      [&](auto native) {
        const auto memory = find_placed(address);
        if (!memory || data == nullptr) return native();
        // The host part of a split allocation has one; memory of a device has none.
        if (attribute == CU_POINTER_ATTRIBUTE_HOST_POINTER) return CUDA_ERROR_INVALID_VALUE;
        if (answer_attribute(data, attribute, address, *memory)) return CUDA_SUCCESS;
        return native();
      },
      data, attribute, address);
}

EBBTIDE_HOOK_EXPORT CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes, void** data,
                                                    CUdeviceptr address) {
  return call_hook<&cuPointerGetAttributes>(
      [&](auto native) {
        const CUresult result = native();
        if (result != CUDA_SUCCESS) return result;
        const auto memory = find_placed(address);
        if (!memory) return result;
        for (unsigned int i = 0; i < count; ++i) {
          if (data[i] == nullptr) continue;
          // In this call an attribute that does not apply is null, and not an error.
          if (attributes[i] == CU_POINTER_ATTRIBUTE_HOST_POINTER) answer<void*>(data[i], nullptr);
          answer_attribute(data[i], attributes[i], address, *memory);
        }
        return result;
      },
      count, attributes, data, address);
}

EBBTIDE_HOOK_EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  return call_hook<&cuIpcGetMemHandle>(
      [&](auto native) {
        if (handle == nullptr || !find_placed(address)) return native();
        ebbtide::log_line(ebbtide::LogLevel::kError, {"cuIpcGetMemHandle: ", why_not_shared(address)});
        return CUDA_ERROR_NOT_SUPPORTED;
      },
      handle, address);
}
