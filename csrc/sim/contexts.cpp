#include "sim/contexts.h"

#include "sim/entry.h"
#include "sim/simulator.h"

namespace ebbtide::sim {
namespace {

// The driver has no limit. Programs go a few contexts deep.
constexpr int kMaxDepth = 64;

// Plain data, so that it outlives every destructor of the thread.
struct Stack {
  uint64_t generation;
  int depth;
  uint64_t contexts[kMaxDepth];
};
thread_local Stack stack{0, 0, {}};

Stack& stack_of_thread() {
  const uint64_t generation = simulator().contexts.generation();
  if (stack.generation != generation) {
    stack.generation = generation;
    stack.depth = 0;
  }
  return stack;
}

}  // namespace

uint64_t Contexts::retain(int device) {
  const uint64_t id = id_of_device(device);
  Context& context = contexts_[id];
  context.device = device;
  ++context.retain_count;
  return id;
}

uint64_t Contexts::make(int device, uint64_t id) {
  contexts_[id] = {.device = device, .retain_count = 1};
  return id;
}

Context* Contexts::find(uint64_t id) {
  const auto found = contexts_.find(id);
  return found == contexts_.end() ? nullptr : &found->second;
}

bool Contexts::is_active(uint64_t id) const {
  const auto found = contexts_.find(id);
  return found != contexts_.end() && found->second.retain_count > 0;
}

uint64_t Contexts::total_retained() const {
  uint64_t total = 0;
  for (const auto& [id, context] : contexts_) total += context.retain_count;
  return total;
}

void Contexts::reset() {
  contexts_.clear();
  ++generation_;
}

uint64_t current_context(Lock&) {
  const Stack& own = stack_of_thread();
  return own.depth > 0 ? own.contexts[own.depth - 1] : 0;
}

void set_current_context(Lock& lock, uint64_t context) {
  Stack& own = stack_of_thread();
  if (own.depth > 0) --own.depth;
  if (context != 0) push_context(lock, context);
}

bool push_context(Lock&, uint64_t context) {
  Stack& own = stack_of_thread();
  if (own.depth == kMaxDepth) return false;
  own.contexts[own.depth++] = context;
  return true;
}

void end_context(Lock& lock, uint64_t context) {
  simulator().streams.drop_context(lock, context);
  simulator().address_space.free_linear_of_context(context);
  simulator().host_memory.free_of_context(context);
  simulator().modules.drop_context(context);
  simulator().peers.drop_context(context);
  // drop_context() released the lock for a while: another thread may have reset everything meanwhile.
  if (Context* found = simulator().contexts.find(context); found != nullptr && found->retain_count > 0) {
    --found->retain_count;
    found->sticky_error = CUDA_SUCCESS;
  }
}

CUresult current_context_state(Lock& lock) {
  const uint64_t id = current_context(lock);
  if (id == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (!simulator().contexts.is_active(id)) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  return simulator().contexts.find(id)->sticky_error;
}

int device_of_context(Lock& lock, uint64_t context) {
  const Context* found = simulator().contexts.find(context != 0 ? context : current_context(lock));
  return found == nullptr ? 0 : found->device;
}

namespace {

CUresult retain(CUcontext* pctx, CUdevice dev) {
  if (pctx == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  if (!simulator().physical.has_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
  *pctx = handle_of<CUcontext>(simulator().contexts.retain(dev));
  return CUDA_SUCCESS;
}

CUresult release(CUdevice dev) {
  Lock lock(simulator().mutex);
  if (!simulator().physical.has_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
  const uint64_t id = Contexts::id_of_device(dev);
  if (!simulator().contexts.is_active(id)) return CUDA_ERROR_INVALID_CONTEXT;
  if (simulator().contexts.find(id)->retain_count > 1) {
    --simulator().contexts.find(id)->retain_count;
    return CUDA_SUCCESS;
  }
  end_context(lock, id);
  return CUDA_SUCCESS;
}

CUresult get_state(CUdevice dev, unsigned int* flags, int* active) {
  if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  if (!simulator().physical.has_device(dev)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = simulator().contexts.is_active(Contexts::id_of_device(dev)) ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult get_current(CUcontext* pctx) {
  if (pctx == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  *pctx = handle_of<CUcontext>(current_context(lock));
  return CUDA_SUCCESS;
}

CUresult set_current(CUcontext ctx) {
  Lock lock(simulator().mutex);
  if (ctx != nullptr && !simulator().contexts.is_active(id_of(ctx))) return CUDA_ERROR_INVALID_CONTEXT;
  set_current_context(lock, id_of(ctx));
  return CUDA_SUCCESS;
}

CUresult get_device(CUdevice* device) {
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  *device = device_of_context(lock, 0);
  return CUDA_SUCCESS;
}

CUresult synchronize() {
  Lock lock(simulator().mutex);
  return simulator().streams.synchronize_context(lock, current_context(lock));
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* pctx, CUdevice dev) {
  EBBTIDE_SIM_FORWARD(cuDevicePrimaryCtxRetain, kDriver, retain, pctx, dev);
}

EBBTIDE_SIM_EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice dev) {
  EBBTIDE_SIM_FORWARD(cuDevicePrimaryCtxRelease, kDriver, release, dev);
}

EBBTIDE_SIM_EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int* flags, int* active) {
  EBBTIDE_SIM_FORWARD(cuDevicePrimaryCtxGetState, kDriver, get_state, dev, flags, active);
}

EBBTIDE_SIM_EXPORT CUresult cuCtxGetCurrent(CUcontext* pctx) {
  EBBTIDE_SIM_FORWARD(cuCtxGetCurrent, kDriver, get_current, pctx);
}

EBBTIDE_SIM_EXPORT CUresult cuCtxSetCurrent(CUcontext ctx) {
  EBBTIDE_SIM_FORWARD(cuCtxSetCurrent, kDriver, set_current, ctx);
}

EBBTIDE_SIM_EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  EBBTIDE_SIM_FORWARD(cuCtxGetDevice, kCurrent, get_device, device);
}

EBBTIDE_SIM_EXPORT CUresult cuCtxSynchronize(void) { EBBTIDE_SIM_FORWARD(cuCtxSynchronize, kContext, synchronize); }

EBBTIDE_SIM_PLAIN_NAME(cuDevicePrimaryCtxRelease);
