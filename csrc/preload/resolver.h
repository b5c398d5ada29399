#pragma once

#include <pthread.h>

#include <atomic>

#include "preload/hooks.h"

// The hooked functions, and the real ones behind them.
//
// Relied on: hooks may run before this library's constructors and after its destructors, in any thread, while another
// thread runs them for the first time. So all state here is constant-initialised, every thread that fills it writes the
// same values, and it needs no lock, no allocation and no destructor.
namespace ebbtide::preload {

// While one lives, its thread is not cancelled. Cancellation unwinds the stack, which ends the process at a noexcept
// function (invariant 4). A cancellation that arrives meanwhile happens at the next cancellation point after it.
class NoCancel {
 public:
  NoCancel() noexcept { ::pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  NoCancel(const NoCancel&) = delete;
  NoCancel& operator=(const NoCancel&) = delete;
  ~NoCancel() { ::pthread_setcancelstate(before_, nullptr); }

 private:
  int before_ = PTHREAD_CANCEL_ENABLE;
};

// dlsym as this library would find it without its own hook: the next one in the chain, which may belong to another
// preloaded library.
using FindSymbol = void* (*)(void* handle, const char* symbol);
FindSymbol next_dlsym() noexcept;

// Of a hooked driver function: the name in messages, and whether its null stream is the thread's own.
template <auto kFunction>
inline constexpr const char* kCall = "";
template <auto kFunction>
inline constexpr bool kIsPerThread = false;
#define EBBTIDE_DRIVER_HOOK(symbol, name, version, flags) \
  template <>                                             \
  inline constexpr const char* kCall<&symbol> = #name;    \
  template <>                                             \
  inline constexpr bool kIsPerThread<&symbol> = (flags) == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
#include "preload/hooks.def"

// Filled by load_driver and load_nvml; read through real().
template <auto kFunction>
inline constinit std::atomic<void*> real_address{nullptr};

// Look up all real functions. False if the library is missing. Neither starts the driver.
bool load_driver() noexcept;
bool load_nvml() noexcept;

// The driver's own function of this symbol, but null before the first look-up: the question does not load the driver.
template <auto kFunction>
decltype(kFunction) real_if_loaded() noexcept {
  return reinterpret_cast<decltype(kFunction)>(real_address<kFunction>.load(std::memory_order_acquire));
}
// The same after a look-up. Null if the driver lacks it, or if there is no driver.
template <auto kFunction>
decltype(kFunction) real() noexcept {
  load_driver();
  return real_if_loaded<kFunction>();
}
template <auto kFunction>
decltype(kFunction) real_nvml() noexcept {
  load_nvml();
  return real_if_loaded<kFunction>();
}

// Whether dlsym must check this name for a hook.
bool is_hooked_name(const char* symbol) noexcept;
// The hook for this name, if the look-up found the real function; else null. Another library may have a function of the
// same name.
void* hook_of_symbol(const char* symbol, const void* found) noexcept;
// The hook of a driver function, or the function itself if it has none. Compared by address, whatever name, version and
// flags the caller used.
void* substitute(void* function) noexcept;

// Whether hooks do anything. EBBTIDE_DRIVER=sim and off switch them off for a process.
bool is_active() noexcept;

}  // namespace ebbtide::preload
