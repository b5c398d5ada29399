// The single entry point of the simulator. Every exported driver function is a signature and one EBBTIDE_SIM_FORWARD
// line. The guard behind it counts the call, applies failure rules and delays, checks what the call needs, and logs the
// result.
//
// Rules:
// - A failure rule comes first: a call that it fails has no effect and checks nothing.
// - Nothing here throws into C, and nothing here is destroyed at exit, so that calls from static destructors still
//   work.
// - In a forked child, a call returns CUDA_ERROR_NOT_INITIALIZED before it takes any lock, as in the real driver. The
//   pages belong to the parent, and another thread may have held the locks at the fork.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <new>
#include <optional>
#include <string>
#include <type_traits>

#define EBBTIDE_SIM_EXPORT extern "C" __attribute__((visibility("default")))

namespace ebbtide::sim {

// The state that a function needs before its body may run.
enum Needs : unsigned {
  kAnytime = 0,          // works before cuInit
  kStateless = 16,       // uses no state of the simulator: also works in a forked child
  kDriver = 1,           // cuInit has been called
  kCurrent = 2 | 1,      // the calling thread has a current context
  kContext = 4 | 2 | 1,  // and the context has no sticky error
  kNoCapture = 8,        // "potentially unsafe": forbidden by captures that the calling thread's capture mode respects
};

struct EntryPoint {
  const char* function;
  unsigned needs;
};

// Counts the call. Returns a result if a rule or an unmet need ends the call here, and nothing if the body is to run.
std::optional<CUresult> before_call(const EntryPoint& point);
void after_call(const EntryPoint& point, const char* argument_names, std::initializer_list<std::string> values,
                CUresult result);

// True in a process that was forked after cuInit.
bool is_forked_child();

// While an object of this class lives, the calling thread runs a stream's host function, where driver calls are not
// permitted.
class HostFunctionScope {
 public:
  HostFunctionScope();
  ~HostFunctionScope();
};

template <typename T>
std::string argument_text(const T& value) {
  if constexpr (std::is_pointer_v<T> || std::is_same_v<T, CUdeviceptr>) {
    char text[24];
    snprintf(text, sizeof text, "0x%llx", (unsigned long long)value);
    return text;
  } else if constexpr (std::is_enum_v<T>) {
    return std::to_string(static_cast<long long>(value));
  } else {
    return std::to_string(value);
  }
}

template <typename Body, typename... Arguments>
CUresult enter(const EntryPoint& point, const char* argument_names, Body&& body,
               const Arguments&... arguments) noexcept {
  if (is_forked_child()) return point.needs == kStateless ? body() : CUDA_ERROR_NOT_INITIALIZED;
  try {
    CUresult result;
    try {
      const auto refusal = before_call(point);
      result = refusal ? *refusal : body();
    } catch (const std::bad_alloc&) {
      result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    after_call(point, argument_names, {argument_text(arguments)...}, result);
    return result;
  } catch (...) {
    return CUDA_ERROR_UNKNOWN;
  }
}

}  // namespace ebbtide::sim

// The body of an exported function: calls `implementation` with the arguments that follow, through the guard.
#define EBBTIDE_SIM_FORWARD(function, needs, implementation, ...)  \
  return ::ebbtide::sim::enter({#function, (needs)}, #__VA_ARGS__, \
                               [&]() -> CUresult { return implementation(__VA_ARGS__); } __VA_OPT__(, ) __VA_ARGS__)

#define EBBTIDE_SIM_TEXT_OF(text) #text
#define EBBTIDE_SIM_TEXT(macro) EBBTIDE_SIM_TEXT_OF(macro)
#define EBBTIDE_SIM_JOIN_OF(a, b) a##b
#define EBBTIDE_SIM_JOIN(a, b) EBBTIDE_SIM_JOIN_OF(a, b)

// For a function that cuda.h exports with a suffix: exports the plain name as well, for clients that look it up. (Under
// most of these names the real driver has old 32-bit versions.) Place it after the definition, in the same file.
#define EBBTIDE_SIM_PLAIN_NAME(function)                                                               \
  EBBTIDE_SIM_EXPORT decltype(function) EBBTIDE_SIM_JOIN(plain_name_in_line_, __LINE__) asm(#function) \
      __attribute__((alias(EBBTIDE_SIM_TEXT(function))))
