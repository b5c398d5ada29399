// Stream-ordered allocation.
//
// Each device has one pool, which keeps nothing. Memory is available at once, and is freed when the stream reaches the
// free. A capture would record these calls as nodes; the simulator does not support that.
#include "sim/entry.h"
#include "sim/linear_memory.h"
#include "sim/simulator.h"

extern "C" {
CUresult cuMemAllocAsync_ptsz(CUdeviceptr* dptr, size_t bytesize, CUstream hStream);
CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr* dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream);
CUresult cuMemFreeAsync_ptsz(CUdeviceptr dptr, CUstream hStream);
}

namespace ebbtide::sim {
namespace {

constexpr uint64_t kFirstPool = 0x2000;

CUmemoryPool pool_of(int device) { return handle_of<CUmemoryPool>(kFirstPool + 16 * static_cast<uint64_t>(device)); }

CUresult default_pool(CUmemoryPool* pool_out, CUdevice dev) {
  if (pool_out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  if (dev < 0 || dev >= simulator().physical.device_count()) return CUDA_ERROR_INVALID_DEVICE;
  *pool_out = pool_of(dev);
  return CUDA_SUCCESS;
}

CUresult check_stream(Lock& lock, CUstream handle, StreamRef& stream) {
  const CUresult wrong = simulator().streams.find(lock, handle, stream);
  if (wrong != CUDA_SUCCESS) return wrong;
  return stream->capture != nullptr ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

CUresult allocate(CUdeviceptr* dptr, size_t bytesize, CUstream hStream) {
  if (dptr == nullptr) return CUDA_ERROR_INVALID_VALUE;
  {
    Lock lock(simulator().mutex);
    StreamRef stream;
    if (const CUresult wrong = check_stream(lock, hStream, stream); wrong != CUDA_SUCCESS) return wrong;
  }
  // Unlike the other calls that allocate, this one accepts zero bytes.
  if (bytesize == 0) {
    *dptr = 0;
    return CUDA_SUCCESS;
  }
  return allocate_linear(*dptr, bytesize, false);
}

CUresult allocate_from_pool(CUdeviceptr* dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream) {
  {
    Lock lock(simulator().mutex);
    if (pool != pool_of(device_of_context(lock, 0))) return CUDA_ERROR_INVALID_VALUE;
  }
  return allocate(dptr, bytesize, hStream);
}

CUresult free_in_order(CUdeviceptr dptr, CUstream hStream) {
  Lock lock(simulator().mutex);
  const auto reservation = simulator().address_space.find_reservation(dptr);
  if (!reservation || reservation->first != dptr || !reservation->second->linear) return CUDA_ERROR_INVALID_VALUE;
  if (reservation->second->linear->is_managed) return CUDA_ERROR_NOT_SUPPORTED;
  StreamRef stream;
  if (const CUresult wrong = check_stream(lock, hStream, stream); wrong != CUDA_SUCCESS) return wrong;
  return simulator().streams.submit(lock, stream,
                                    [dptr](Lock&) { return simulator().address_space.free_linear(dptr); });
}

CUstream per_thread(CUstream stream) { return stream == nullptr ? CU_STREAM_PER_THREAD : stream; }

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool_out, CUdevice dev) {
  EBBTIDE_SIM_FORWARD(cuDeviceGetDefaultMemPool, kDriver, default_pool, pool_out, dev);
}

EBBTIDE_SIM_EXPORT CUresult cuMemAllocAsync(CUdeviceptr* dptr, size_t bytesize, CUstream hStream) {
  EBBTIDE_SIM_FORWARD(cuMemAllocAsync, kContext, allocate, dptr, bytesize, hStream);
}

EBBTIDE_SIM_EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr* dptr, size_t bytesize, CUmemoryPool pool,
                                                    CUstream hStream) {
  EBBTIDE_SIM_FORWARD(cuMemAllocFromPoolAsync, kContext, allocate_from_pool, dptr, bytesize, pool, hStream);
}

EBBTIDE_SIM_EXPORT CUresult cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream) {
  EBBTIDE_SIM_FORWARD(cuMemFreeAsync, kContext, free_in_order, dptr, hStream);
}

EBBTIDE_SIM_EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr* dptr, size_t bytesize, CUstream hStream) {
  return cuMemAllocAsync(dptr, bytesize, per_thread(hStream));
}

EBBTIDE_SIM_EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr* dptr, size_t bytesize, CUmemoryPool pool,
                                                         CUstream hStream) {
  return cuMemAllocFromPoolAsync(dptr, bytesize, pool, per_thread(hStream));
}

EBBTIDE_SIM_EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr dptr, CUstream hStream) {
  return cuMemFreeAsync(dptr, per_thread(hStream));
}
