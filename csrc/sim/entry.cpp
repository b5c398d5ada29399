#include "sim/entry.h"

#include <unistd.h>

#include <chrono>
#include <thread>

#include "sim/capture.h"
#include "sim/contexts.h"
#include "sim/rules.h"
#include "sim/simulator.h"

namespace ebbtide::sim {
namespace {

// Plain data, so that it outlives every destructor.
thread_local int host_function_depth = 0;

CUresult unmet_need(const EntryPoint& point) {
  Lock lock(simulator().mutex);
  if (!simulator().is_initialised) return CUDA_ERROR_NOT_INITIALIZED;
  if ((point.needs & kCurrent) == kCurrent) {
    const CUresult state = current_context_state(lock);
    const bool is_gone = state == CUDA_ERROR_INVALID_CONTEXT || state == CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (is_gone || (state != CUDA_SUCCESS && (point.needs & kContext) == kContext)) return state;
  }
  if (point.needs & kNoCapture) return refuse_unsafe_call(lock);
  return CUDA_SUCCESS;
}

}  // namespace

HostFunctionScope::HostFunctionScope() { ++host_function_depth; }
HostFunctionScope::~HostFunctionScope() { --host_function_depth; }

bool is_forked_child() {
  const pid_t owner = simulator().owner.load(std::memory_order_relaxed);
  return owner != 0 && owner != getpid();
}

std::optional<CUresult> before_call(const EntryPoint& point) {
  const Verdict verdict = rules().count_call(point.function);
  if (verdict.delay_us != 0) std::this_thread::sleep_for(std::chrono::microseconds(verdict.delay_us));
  if (verdict.failure) return verdict.failure;
  if (verdict.is_hidden) return CUDA_ERROR_NOT_SUPPORTED;
  if (point.needs == kAnytime || point.needs == kStateless) return std::nullopt;
  if (host_function_depth > 0) return CUDA_ERROR_NOT_PERMITTED;
  const CUresult refusal = unmet_need(point);
  return refusal == CUDA_SUCCESS ? std::nullopt : std::optional(refusal);
}

void after_call(const EntryPoint& point, const char* argument_names, std::initializer_list<std::string> values,
                CUresult result) {
  std::string line = point.function;
  line += '(';
  const char* name = argument_names;
  for (const std::string& value : values) {
    const char* end = name;
    while (*end != '\0' && *end != ',') ++end;
    line.append(name, end).append("=").append(value);
    name = end;
    while (*name == ',' || *name == ' ') ++name;
    if (*name != '\0') line += ", ";
  }
  line.append(") = ").append(std::to_string(static_cast<int>(result))).append("\n");
  rules().log(std::move(line));
}

}  // namespace ebbtide::sim
