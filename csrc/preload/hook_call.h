#pragma once

#include <functional>
#include <utility>

#include "preload/resolver.h"

// The steps of every hook around its own work.
namespace ebbtide::preload {

// While one lives, calls of hooks in this thread go to the real functions: the driver, or another preloaded library,
// may call a hook from inside a real call.
class HookScope {
 public:
  HookScope() noexcept;
  HookScope(const HookScope&) = delete;
  HookScope& operator=(const HookScope&) = delete;
  ~HookScope();
  // Whether the hook may act: not within another hook, not in a forked child, not switched off.
  bool may_act() const noexcept { return may_act_; }

 private:
  NoCancel no_cancel_;
  bool may_act_;
};

// Inside a catch block: the code for the exception in flight, and a line on stderr.
CUresult code_of_exception(const char* call) noexcept;

// Runs body(native), where native() is the real function's answer to the arguments, or only that if the hook may not
// act. Never throws; returns a code.
template <auto kFunction, typename Body, typename... Arguments>
CUresult call_hook(Body&& body, Arguments... arguments) noexcept {
  const HookScope scope;
  const auto function = real<kFunction>();
  if (function == nullptr) return CUDA_ERROR_NOT_INITIALIZED;
  if (!scope.may_act()) return function(arguments...);
  try {
    const auto native = [&] { return function(arguments...); };
    return std::forward<Body>(body)(std::cref(native));  // which fits into a Native without memory
  } catch (...) {
    return code_of_exception(kCall<kFunction>);
  }
}

// The same for NVML, which answers first; body() changes its answer.
template <auto kFunction, typename Memory, typename Body>
NvmlResult call_nvml(NvmlDevice device, Memory* memory, Body&& body) noexcept {
  const auto function = real_nvml<kFunction>();
  if (function == nullptr) return kNvmlUninitialized;
  const HookScope scope;
  const NvmlResult result = function(device, memory);
  if (result != kNvmlSuccess || memory == nullptr || !scope.may_act()) return result;
  try {
    std::forward<Body>(body)();
  } catch (...) {
    code_of_exception("nvmlDeviceGetMemoryInfo");
  }
  return result;
}

// The stream that a call of this function means by `stream`.
template <auto kFunction>
CUstream stream_of(CUstream stream) {
  return stream == nullptr && kIsPerThread<kFunction> ? CU_STREAM_PER_THREAD : stream;
}

}  // namespace ebbtide::preload
