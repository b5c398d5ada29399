// Memory of cuMemAlloc and managed memory, and the amount of memory that a device has.
#include "sim/linear_memory.h"

#include <cstdint>

#include "sim/entry.h"
#include "sim/host_memory.h"
#include "sim/simulator.h"

namespace ebbtide::sim {
namespace {

constexpr uint64_t kPitch = 512;

CUresult allocate(CUdeviceptr* dptr, size_t bytesize) {
  return dptr == nullptr ? CUDA_ERROR_INVALID_VALUE : allocate_linear(*dptr, bytesize, false);
}

CUresult allocate_pitch(CUdeviceptr* dptr, size_t* pPitch, size_t WidthInBytes, size_t Height,
                        unsigned int ElementSizeBytes) {
  const bool is_element = ElementSizeBytes == 4 || ElementSizeBytes == 8 || ElementSizeBytes == 16;
  if (dptr == nullptr || pPitch == nullptr || WidthInBytes == 0 || Height == 0 || !is_element)
    return CUDA_ERROR_INVALID_VALUE;
  if (WidthInBytes > UINT64_MAX / 2 / Height) return CUDA_ERROR_OUT_OF_MEMORY;
  const uint64_t pitch = (WidthInBytes + kPitch - 1) / kPitch * kPitch;
  const CUresult result = allocate_linear(*dptr, pitch * Height, false);
  if (result == CUDA_SUCCESS) *pPitch = pitch;
  return result;
}

CUresult allocate_managed(CUdeviceptr* dptr, size_t bytesize, unsigned int flags) {
  const bool is_known = flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST;
  return dptr == nullptr || !is_known ? CUDA_ERROR_INVALID_VALUE : allocate_linear(*dptr, bytesize, true);
}

CUresult free_memory(CUdeviceptr dptr) {
  if (dptr == 0) return CUDA_SUCCESS;
  Lock lock(simulator().mutex);
  const auto reservation = simulator().address_space.find_reservation(dptr);
  if (!reservation || reservation->first != dptr || !reservation->second->linear) return CUDA_ERROR_INVALID_VALUE;
  // The driver waits for the device before it frees the memory, and programs rely on that.
  simulator().streams.drain(lock, reservation->second->linear->context);
  return simulator().address_space.free_linear(dptr);
}

CUresult memory_info(size_t* free, size_t* total) {
  Lock lock(simulator().mutex);
  const int device = device_of_context(lock, 0);
  if (free != nullptr) *free = simulator().physical.free_bytes(device);
  if (total != nullptr) *total = simulator().physical.capacity(device);
  return CUDA_SUCCESS;
}

}  // namespace

// Managed memory is in the host's file, and no device's capacity bounds it. The simulator does not migrate pages.
CUresult allocate_linear(CUdeviceptr& address, size_t size_bytes, bool is_managed) {
  if (size_bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t mapped = round_to_pages(size_bytes);
  if (mapped < size_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  Lock lock(simulator().mutex);
  const uint64_t context = current_context(lock);
  const int device = device_of_context(lock, context);
  const CUmemLocation location{is_managed ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE,
                               is_managed ? 0 : device};
  Block block;
  const CUresult failed = simulator().physical.allocate(mapped, location, simulator().next_id(), block);
  if (failed != CUDA_SUCCESS) return failed;
  uint64_t found = 0;
  const CUresult result =
      simulator().address_space.allocate_linear(found, {size_bytes, context, is_managed}, block, device);
  if (result == CUDA_SUCCESS) address = found;
  return result;
}

}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuMemAlloc(CUdeviceptr* dptr, size_t bytesize) {
  EBBTIDE_SIM_FORWARD(cuMemAlloc, kContext | kNoCapture, allocate, dptr, bytesize);
}

EBBTIDE_SIM_EXPORT CUresult cuMemAllocPitch(CUdeviceptr* dptr, size_t* pPitch, size_t WidthInBytes, size_t Height,
                                            unsigned int ElementSizeBytes) {
  EBBTIDE_SIM_FORWARD(cuMemAllocPitch, kContext | kNoCapture, allocate_pitch, dptr, pPitch, WidthInBytes, Height,
                      ElementSizeBytes);
}

EBBTIDE_SIM_EXPORT CUresult cuMemAllocManaged(CUdeviceptr* dptr, size_t bytesize, unsigned int flags) {
  EBBTIDE_SIM_FORWARD(cuMemAllocManaged, kContext | kNoCapture, allocate_managed, dptr, bytesize, flags);
}

EBBTIDE_SIM_EXPORT CUresult cuMemFree(CUdeviceptr dptr) {
  EBBTIDE_SIM_FORWARD(cuMemFree, kDriver | kNoCapture, free_memory, dptr);
}

EBBTIDE_SIM_EXPORT CUresult cuMemGetInfo(size_t* free, size_t* total) {
  EBBTIDE_SIM_FORWARD(cuMemGetInfo, kContext, memory_info, free, total);
}

EBBTIDE_SIM_PLAIN_NAME(cuMemAlloc);
EBBTIDE_SIM_PLAIN_NAME(cuMemAllocPitch);
EBBTIDE_SIM_PLAIN_NAME(cuMemFree);
EBBTIDE_SIM_PLAIN_NAME(cuMemGetInfo);
