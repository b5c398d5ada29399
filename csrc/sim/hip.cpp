// HIP's names, so that the simulator is also a driver of AMD's: each function of driver/functions.def calls the one of
// CUDA's name, with whose rules, failures and log. Without a context: a thread that has set no device has device 0, and
// the first call starts the driver.
#include <cuda.h>

#include "sim/contexts.h"
#include "sim/entry.h"
#include "sim/modules.h"
#include "sim/simulator.h"

namespace ebbtide::sim {
namespace {

constexpr int kVersion = 70125424;  // 7.1, unless a test has set one of HIP's
constexpr int kLeastVersion = 10000000;
constexpr int kFirstWithFileByValue = 70100000;  // 7.1
thread_local int device_of_thread = 0;

CUresult set_device(int device) {
  const uint64_t context = Contexts::id_of_device(device);
  {
    Lock lock(simulator().mutex);
    if (!simulator().physical.has_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (!simulator().contexts.is_active(context)) simulator().contexts.retain(device);
  }
  const CUresult result = cuCtxSetCurrent(handle_of<CUcontext>(context));
  if (result == CUDA_SUCCESS) device_of_thread = device;
  return result;
}

// What a call finds to be so.
CUresult be_ready() {
  if (is_forked_child()) return CUDA_SUCCESS;  // the call itself refuses
  bool is_initialised = false;
  bool has_context = false;
  {
    Lock lock(simulator().mutex);
    is_initialised = simulator().is_initialised;
    has_context = is_initialised && current_context(lock) != 0;
  }
  if (!is_initialised) {
    if (const CUresult failed = cuInit(0); failed != CUDA_SUCCESS) return failed;
  }
  return has_context ? CUDA_SUCCESS : set_device(device_of_thread);
}

template <auto kFunction>
struct Forward;
template <typename... Arguments, CUresult (*kFunction)(Arguments...)>
struct Forward<kFunction> {
  static CUresult call(Arguments... arguments) {
    const CUresult failed = be_ready();
    return failed != CUDA_SUCCESS ? failed : kFunction(arguments...);
  }
};

template <>
struct Forward<&cuInit> {
  static CUresult call(unsigned int flags) { return cuInit(flags); }
};
template <>
struct Forward<&cuGetErrorName> {
  static CUresult call(CUresult result, const char** text) { return cuGetErrorName(result, text); }
};
template <>
struct Forward<&cuGetErrorString> {
  static CUresult call(CUresult result, const char** text) { return cuGetErrorString(result, text); }
};
int version_as_hip(int version) { return version < kLeastVersion ? kVersion : version; }

template <>
struct Forward<&cuDriverGetVersion> {
  static CUresult call(int* version) {
    const CUresult result = cuDriverGetVersion(version);
    if (result == CUDA_SUCCESS) *version = version_as_hip(*version);
    return result;
  }
};

template <>
struct Forward<&cuModuleLoadData> {
  static CUresult call(CUmodule* module, const void* image) {
    const CUresult failed = be_ready();
    return failed != CUDA_SUCCESS ? failed : load_code_objects(module, image);
  }
};

CUresult hip_device_attribute(int* value, int attribute, int device) {
  switch (attribute) {
#define EBBTIDE_HIP_ATTRIBUTE(name, number) \
  case number: return cuDeviceGetAttribute(value, CU_DEVICE_ATTRIBUTE_##name, device);
#include "driver/hip_attributes.def"
#undef EBBTIDE_HIP_ATTRIBUTE
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

// Exports `hip_name`, without its type, which is that of CUDA's function: resolved when the library is loaded.
#define EBBTIDE_HIP_same(name, hip_name)                                                                     \
  extern "C" void* ebbtide_resolve_##hip_name() { return reinterpret_cast<void*>(&Forward<&::name>::call); } \
  EBBTIDE_SIM_EXPORT void hip_name() __attribute__((ifunc("ebbtide_resolve_" #hip_name)));
#define EBBTIDE_HIP_adapted(name, hip_name)
#define EBBTIDE_FUNCTION(name, least_version, necessity, hip_name, how) EBBTIDE_HIP_##how(name, hip_name)
#include "driver/functions.def"
#undef EBBTIDE_FUNCTION

// Those of another shape.
EBBTIDE_SIM_EXPORT CUresult hipDeviceGetAttribute(int* value, int attribute, int device) {
  const CUresult failed = be_ready();
  return failed != CUDA_SUCCESS ? failed : hip_device_attribute(value, attribute, device);
}

EBBTIDE_SIM_EXPORT CUresult hipSetDevice(int device) {
  const CUresult failed = be_ready();
  return failed != CUDA_SUCCESS ? failed : set_device(device);
}

EBBTIDE_SIM_EXPORT CUresult hipDevicePrimaryCtxRetain(void** context, int device) {
  const CUresult failed = be_ready();
  return failed != CUDA_SUCCESS ? failed : cuDevicePrimaryCtxRetain(reinterpret_cast<CUcontext*>(context), device);
}

EBBTIDE_SIM_EXPORT CUresult hipMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* file,
                                                            CUmemAllocationHandleType type) {
  const CUresult failed = be_ready();
  if (failed != CUDA_SUCCESS) return failed;
  if (version_as_hip(simulator().driver_version) < kFirstWithFileByValue)
    file = reinterpret_cast<void*>(intptr_t{*static_cast<const int*>(file)});
  return cuMemImportFromShareableHandle(handle, file, type);
}

EBBTIDE_SIM_EXPORT CUresult hipDeviceEnablePeerAccess(int peer, unsigned int flags) {
  if (const CUresult failed = be_ready(); failed != CUDA_SUCCESS) return failed;
  CUcontext context = nullptr;
  if (const CUresult failed = cuDevicePrimaryCtxRetain(&context, peer); failed != CUDA_SUCCESS) return failed;
  const CUresult result = cuCtxEnablePeerAccess(context, flags);
  cuDevicePrimaryCtxRelease(peer);
  return result;
}

EBBTIDE_SIM_EXPORT CUresult hipStreamWaitValue32(CUstream stream, void* address, uint32_t value, unsigned int flags,
                                                 uint32_t mask) {
  if (mask != UINT32_MAX) return CUDA_ERROR_NOT_SUPPORTED;
  const CUresult failed = be_ready();
  return failed != CUDA_SUCCESS ? failed
                                : cuStreamWaitValue32(stream, reinterpret_cast<CUdeviceptr>(address), value, flags);
}
