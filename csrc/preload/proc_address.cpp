#include "preload/hook_call.h"
#include "preload/hooks.h"

// The resolver in both forms: 4 arguments since CUDA 11.3, 5 since 12.0. The real one answers first, so that versions,
// flags and errors are its own. If it returns a hooked function, its hook is returned instead. By the same rule, a
// caller that asks for a resolver receives one of these two, each in its own form.
using namespace ebbtide::preload;

namespace {

void substitute_found(CUresult result, void** function) noexcept {
  if (result == CUDA_SUCCESS && function != nullptr && *function != nullptr) *function = substitute(*function);
}

}  // namespace

EBBTIDE_HOOK_EXPORT CUresult cuGetProcAddress(const char* symbol, void** function, int version, cuuint64_t flags) {
  return call_hook<&cuGetProcAddress>(
      "cuGetProcAddress",
      [&](auto real_function) {
        const CUresult result = real_function(symbol, function, version, flags);
        substitute_found(result, function);
        return result;
      },
      symbol, function, version, flags);
}

EBBTIDE_HOOK_EXPORT CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version, cuuint64_t flags,
                                                 CUdriverProcAddressQueryResult* status) {
  return call_hook<&cuGetProcAddress_v2>(
      "cuGetProcAddress_v2",
      [&](auto real_function) {
        const CUresult result = real_function(symbol, function, version, flags, status);
        substitute_found(result, function);
        return result;
      },
      symbol, function, version, flags, status);
}
