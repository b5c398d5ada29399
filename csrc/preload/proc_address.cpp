#include "preload/hook_call.h"

// The resolver in both forms: 4 arguments since CUDA 11.3, 5 since 12.0. The real one answers first, so that versions,
// flags and errors are its own. If it returns a hooked function, its hook is returned instead. By the same rule, a
// caller that asks for a resolver receives one of these two, each in its own form.
using namespace ebbtide::preload;

namespace {

template <auto kFunction, typename... Arguments>
CUresult resolve(const char* symbol, void** function, Arguments... arguments) noexcept {
  return call_hook<kFunction>(
      [&](auto native) {
        const CUresult result = native();
        if (result == CUDA_SUCCESS && function != nullptr && *function != nullptr) *function = substitute(*function);
        return result;
      },
      symbol, function, arguments...);
}

}  // namespace

EBBTIDE_HOOK_EXPORT CUresult cuGetProcAddress(const char* symbol, void** function, int version, cuuint64_t flags) {
  return resolve<&cuGetProcAddress>(symbol, function, version, flags);
}

EBBTIDE_HOOK_EXPORT CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version, cuuint64_t flags,
                                                 CUdriverProcAddressQueryResult* status) {
  return resolve<&cuGetProcAddress_v2>(symbol, function, version, flags, status);
}
