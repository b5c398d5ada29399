// cuMemAlloc's memory, and how much a device has.
#include "sim/entry.h"
#include "sim/simulator.h"

namespace ebbtide::sim {
namespace {

constexpr uint64_t kPage = 4096;

CUresult allocate(CUdeviceptr* dptr, size_t bytesize) {
  if (dptr == nullptr || bytesize == 0) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t mapped = (bytesize + kPage - 1) / kPage * kPage;
  if (mapped < bytesize) return CUDA_ERROR_OUT_OF_MEMORY;
  Lock lock(simulator().mutex);
  const uint64_t context = current_context(lock);
  const CUmemLocation location{CU_MEM_LOCATION_TYPE_DEVICE, device_of_context(lock, context)};
  Block block;
  const CUresult failed = simulator().physical.allocate(mapped, location, simulator().next_id(), block);
  if (failed != CUDA_SUCCESS) return failed;
  uint64_t address = 0;
  const CUresult result = simulator().address_space.allocate_linear(address, bytesize, block, context);
  if (result == CUDA_SUCCESS) *dptr = address;
  return result;
}

CUresult free_memory(CUdeviceptr dptr) {
  if (dptr == 0) return CUDA_SUCCESS;
  Lock lock(simulator().mutex);
  const auto reservation = simulator().address_space.find_reservation(dptr);
  if (!reservation || reservation->first != dptr || !reservation->second->linear) return CUDA_ERROR_INVALID_VALUE;
  // The driver waits for the device before it takes the memory away, and programs rely on it.
  simulator().streams.drain(lock, reservation->second->linear->context);
  return simulator().address_space.free_linear(dptr);
}

CUresult memory_info(size_t* free, size_t* total) {
  if (free == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  const int device = device_of_context(lock, 0);
  *free = simulator().physical.free_bytes(device);
  *total = simulator().physical.capacity(device);
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuMemAlloc(CUdeviceptr* dptr, size_t bytesize) {
  EBBTIDE_SIM_FORWARD(cuMemAlloc, kContext | kNoCapture, allocate, dptr, bytesize);
}

EBBTIDE_SIM_EXPORT CUresult cuMemFree(CUdeviceptr dptr) {
  EBBTIDE_SIM_FORWARD(cuMemFree, kDriver | kNoCapture, free_memory, dptr);
}

EBBTIDE_SIM_EXPORT CUresult cuMemGetInfo(size_t* free, size_t* total) {
  EBBTIDE_SIM_FORWARD(cuMemGetInfo, kContext, memory_info, free, total);
}

EBBTIDE_SIM_PLAIN_NAME(cuMemAlloc);
EBBTIDE_SIM_PLAIN_NAME(cuMemFree);
EBBTIDE_SIM_PLAIN_NAME(cuMemGetInfo);
