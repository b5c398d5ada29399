#include "driver/hip.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "base/error.h"

namespace ebbtide {
namespace {

// --- functions of another shape -------------------------------------------------------------------------------------

// What HIP has no number for its devices lack.
constexpr int kNoAttribute = -1;
constexpr int hip_attribute(CUdevice_attribute which) {
  switch (which) {
#define EBBTIDE_HIP_ATTRIBUTE(name, number) \
  case CU_DEVICE_ATTRIBUTE_##name: return number;
#include "driver/hip_attributes.def"
#undef EBBTIDE_HIP_ATTRIBUTE
    default: return kNoAttribute;
  }
}

// One for each row of functions.def that is adapted: `hip` is HIP's function.
template <auto kOf>
struct Adapted;

template <>
struct Adapted<&cuDeviceGetAttribute> {
  static inline CUresult (*hip)(int* value, int attribute, int device) = nullptr;
  static CUresult call(int* value, CUdevice_attribute which, CUdevice device) {
    const int attribute = hip_attribute(which);
    if (attribute != kNoAttribute) return hip(value, attribute, device);
    *value = 0;
    return CUDA_SUCCESS;
  }
};

// A context is the device, and never null.
CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(static_cast<intptr_t>(device) + 1); }
int device_of(CUcontext context) { return static_cast<int>(reinterpret_cast<intptr_t>(context) - 1); }

template <>
struct Adapted<&cuCtxGetCurrent> {
  static inline CUresult (*hip)(int* device) = nullptr;
  static CUresult call(CUcontext* context) {
    int device = 0;
    const CUresult result = hip(&device);
    if (result == CUDA_SUCCESS) *context = context_of(device);
    return result;
  }
};

template <>
struct Adapted<&cuCtxSetCurrent> {
  static inline CUresult (*hip)(int device) = nullptr;
  static CUresult call(CUcontext context) { return context == nullptr ? CUDA_SUCCESS : hip(device_of(context)); }
};

// A device is in use, as the state of its primary context tells, once a thread has set it.
template <>
struct Adapted<&cuDevicePrimaryCtxRetain> {
  static inline CUresult (*hip)(void** context, int device) = nullptr;
  static CUresult call(CUcontext* context, CUdevice device) {
    void* ignored = nullptr;
    if (const CUresult result = hip(&ignored, device); result != CUDA_SUCCESS) return result;
    CUcontext previous = nullptr;
    if (const CUresult result = Adapted<&cuCtxGetCurrent>::call(&previous); result != CUDA_SUCCESS) return result;
    *context = context_of(device);
    const CUresult result = Adapted<&cuCtxSetCurrent>::call(*context);
    return result != CUDA_SUCCESS ? result : Adapted<&cuCtxSetCurrent>::call(previous);
  }
};

template <>
struct Adapted<&cuCtxEnablePeerAccess> {
  static inline CUresult (*hip)(int peer, unsigned int flags) = nullptr;
  static CUresult call(CUcontext peer, unsigned int flags) { return hip(device_of(peer), flags); }
};

template <>
struct Adapted<&cuStreamWaitValue32> {
  static inline CUresult (*hip)(CUstream stream, void* address, uint32_t value, unsigned int flags,
                                uint32_t mask) = nullptr;
  static CUresult call(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
    return hip(stream, reinterpret_cast<void*>(address), value, flags, UINT32_MAX);
  }
};

// Before 7.1 the descriptor is passed by its address (csrc/DESIGN.md, F53).
template <>
struct Adapted<&cuMemImportFromShareableHandle> {
  static inline CUresult (*hip)(CUmemGenericAllocationHandle* handle, void* file, CUmemAllocationHandleType) = nullptr;
  static inline bool takes_address = false;
  static CUresult call(CUmemGenericAllocationHandle* handle, void* value, CUmemAllocationHandleType type) {
    int file = static_cast<int>(reinterpret_cast<intptr_t>(value));
    return hip(handle, takes_address ? static_cast<void*>(&file) : value, type);
  }
};

// --- the table ------------------------------------------------------------------------------------------------------

constexpr int kOldestVersion = 60000000;         // 6.0
constexpr int kFirstWithFileByValue = 70100000;  // 7.1
constexpr const char* kNeeded = "ebbtide needs ROCm 6.0 or newer; install a torch with a newer ROCm";

class Resolver {
 public:
  explicit Resolver(void* library) : library_(library) {}

  template <typename Function>
  void find(const char* name, bool is_required, Function*& function) {
    function = reinterpret_cast<Function*>(::dlsym(library_, name));
    if (function == nullptr && is_required) missing_ += (missing_.empty() ? "" : ", ") + std::string(name);
  }
  const std::string& missing() const { return missing_; }

 private:
  void* const library_;
  std::string missing_;
};

template <auto kOf, typename Entry>
void adapt(Resolver& resolver, const char* name, bool is_required, Entry*& entry) {
  resolver.find(name, is_required, Adapted<kOf>::hip);
  entry = Adapted<kOf>::hip == nullptr ? nullptr : &Adapted<kOf>::call;
}

int note_if_hip(dl_phdr_info* info, size_t /*size*/, void* path) {
  const char* const slash = std::strrchr(info->dlpi_name, '/');
  const char* const name = slash == nullptr ? info->dlpi_name : slash + 1;
  if (std::strncmp(name, "libamdhip64", 11) != 0) return 0;
  *static_cast<std::string*>(path) = info->dlpi_name;
  return 1;
}

}  // namespace

Driver resolve_hip(void* library) {
  Driver table;
  Resolver resolver(library);
  constexpr bool required = true;
  constexpr bool optional = false;
#define EBBTIDE_HIP_same(name, need, hip_name) resolver.find(#hip_name, need, table.name);
#define EBBTIDE_HIP_adapted(name, need, hip_name) adapt<&::name>(resolver, #hip_name, need, table.name);
#define EBBTIDE_FUNCTION(name, version, need, hip_name, how) EBBTIDE_HIP_##how(name, need, hip_name)
#include "driver/functions.def"
#undef EBBTIDE_FUNCTION
  if (!resolver.missing().empty()) {
    throw StateError("HIP lacks " + resolver.missing() + ": " + kNeeded);
  }
  int version = 0;
  check(table.cuDriverGetVersion(&version), "hipDriverGetVersion");
  if (version < kOldestVersion)
    throw StateError("HIP is older than 6.0, with other structures (its version is " + std::to_string(version) +
                     "): " + kNeeded);
  Adapted<&cuMemImportFromShareableHandle>::takes_address = version < kFirstWithFileByValue;
  return table;
}

void* open_hip_library() {
  std::string loaded;
  ::dl_iterate_phdr(&note_if_hip, &loaded);
  return ::dlopen(loaded.empty() ? "libamdhip64.so" : loaded.c_str(), RTLD_NOW | RTLD_LOCAL);
}

}  // namespace ebbtide
