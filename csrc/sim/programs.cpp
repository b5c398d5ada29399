// Contexts that a program makes for itself. ebbtide uses primary contexts only; plain programs of the driver API begin
// with cuCtxCreate.
#include "sim/contexts.h"
#include "sim/entry.h"
#include "sim/simulator.h"

namespace ebbtide::sim {
namespace {

constexpr unsigned kContextFlags = 0xff;  // CU_CTX_FLAGS_MASK of the newest header

CUresult make_context(CUcontext* pctx, unsigned int flags, CUdevice dev) {
  if (pctx == nullptr || (flags & ~kContextFlags) != 0) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  if (dev < 0 || dev >= simulator().physical.device_count()) return CUDA_ERROR_INVALID_DEVICE;
  const uint64_t id = simulator().next_id();
  if (!push_context(lock, id)) return CUDA_ERROR_OUT_OF_MEMORY;
  *pctx = handle_of<CUcontext>(simulator().contexts.make(dev, id));
  return CUDA_SUCCESS;
}

// Execution affinities divide a device's multiprocessors, of which this one has none.
CUresult make_context_among(CUcontext* pctx, const void* affinities, int affinity_count, unsigned int flags,
                            CUdevice dev) {
  if (affinity_count < 0 || (affinity_count > 0 && affinities == nullptr)) return CUDA_ERROR_INVALID_VALUE;
  return affinity_count > 0 ? CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY : make_context(pctx, flags, dev);
}

CUresult make_context_with(CUcontext* pctx, const void* parameters, unsigned int flags, CUdevice dev) {
  // They divide a device among processes or partitions; this one is nobody else's.
  return parameters != nullptr ? CUDA_ERROR_NOT_SUPPORTED : make_context(pctx, flags, dev);
}

CUresult destroy_context(CUcontext ctx) {
  Lock lock(simulator().mutex);
  const uint64_t id = id_of(ctx);
  const bool is_own = simulator().contexts.is_active(id);
  if (!is_own || id == Contexts::id_of_device(simulator().contexts.find(id)->device)) return CUDA_ERROR_INVALID_CONTEXT;
  if (current_context(lock) == id) set_current_context(lock, 0);
  end_context(lock, id);
  return CUDA_SUCCESS;
}

CUresult push(CUcontext ctx) {
  Lock lock(simulator().mutex);
  if (!simulator().contexts.is_active(id_of(ctx))) return CUDA_ERROR_INVALID_CONTEXT;
  return push_context(lock, id_of(ctx)) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult pop(CUcontext* pctx) {
  Lock lock(simulator().mutex);
  const uint64_t id = current_context(lock);
  if (id == 0) return CUDA_ERROR_INVALID_CONTEXT;
  set_current_context(lock, 0);
  if (pctx != nullptr) *pctx = handle_of<CUcontext>(id);
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

// The shapes of cuCtxCreate: since CUDA 3.2, since 11.4, and since 12.5. Older headers lack the types of the newer
// ones' parameters, and each header declares one of them, so these have names of their own.
EBBTIDE_SIM_EXPORT CUresult ebbtide_context_v2(CUcontext* pctx, unsigned int flags, CUdevice dev) asm("cuCtxCreate_v2");
EBBTIDE_SIM_EXPORT CUresult ebbtide_context_v3(CUcontext* pctx, void* affinities, int affinity_count,
                                               unsigned int flags, CUdevice dev) asm("cuCtxCreate_v3");
EBBTIDE_SIM_EXPORT CUresult ebbtide_context_v4(CUcontext* pctx, void* parameters, unsigned int flags,
                                               CUdevice dev) asm("cuCtxCreate_v4");

EBBTIDE_SIM_EXPORT CUresult ebbtide_context_v2(CUcontext* pctx, unsigned int flags, CUdevice dev) {
  EBBTIDE_SIM_FORWARD(cuCtxCreate, kDriver, make_context, pctx, flags, dev);
}

EBBTIDE_SIM_EXPORT CUresult ebbtide_context_v3(CUcontext* pctx, void* affinities, int affinity_count,
                                               unsigned int flags, CUdevice dev) {
  EBBTIDE_SIM_FORWARD(cuCtxCreate, kDriver, make_context_among, pctx, affinities, affinity_count, flags, dev);
}

EBBTIDE_SIM_EXPORT CUresult ebbtide_context_v4(CUcontext* pctx, void* parameters, unsigned int flags, CUdevice dev) {
  EBBTIDE_SIM_FORWARD(cuCtxCreate, kDriver, make_context_with, pctx, parameters, flags, dev);
}

EBBTIDE_SIM_EXPORT CUresult cuCtxDestroy(CUcontext ctx) {
  EBBTIDE_SIM_FORWARD(cuCtxDestroy, kDriver | kNoCapture, destroy_context, ctx);
}

EBBTIDE_SIM_EXPORT CUresult cuCtxPushCurrent(CUcontext ctx) {
  EBBTIDE_SIM_FORWARD(cuCtxPushCurrent, kDriver, push, ctx);
}

EBBTIDE_SIM_EXPORT CUresult cuCtxPopCurrent(CUcontext* pctx) {
  EBBTIDE_SIM_FORWARD(cuCtxPopCurrent, kDriver, pop, pctx);
}

EBBTIDE_SIM_EXPORT decltype(ebbtide_context_v2) ebbtide_context asm("cuCtxCreate")
    __attribute__((alias("cuCtxCreate_v2")));
EBBTIDE_SIM_PLAIN_NAME(cuCtxDestroy);
EBBTIDE_SIM_PLAIN_NAME(cuCtxPushCurrent);
EBBTIDE_SIM_PLAIN_NAME(cuCtxPopCurrent);
