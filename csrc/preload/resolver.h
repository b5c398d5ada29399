#pragma once

#include <atomic>

#include "preload/hooks.h"

// The hooked functions, and the real ones behind them.
//
// Relied on: hooks may run before this library's constructors and after its destructors, in any thread, while another
// thread runs them for the first time. So all state here is constant-initialised, every thread that fills it writes the
// same values, and it needs no lock, no allocation and no destructor.
namespace ebbtide::preload {

// Filled by load_driver and load_nvml; read through real().
template <auto kFunction>
inline constinit std::atomic<void*> real_address{nullptr};

// Look up all real functions. False if the library is missing. Neither starts the driver.
bool load_driver() noexcept;
bool load_nvml() noexcept;

// The driver's own function of this symbol. Null if the driver lacks it, or if there is no driver.
template <auto kFunction>
decltype(kFunction) real() noexcept {
  load_driver();
  return reinterpret_cast<decltype(kFunction)>(real_address<kFunction>.load(std::memory_order_acquire));
}
// The same, but null before the first look-up, so that the question does not load the driver.
template <auto kFunction>
decltype(kFunction) real_if_loaded() noexcept {
  return reinterpret_cast<decltype(kFunction)>(real_address<kFunction>.load(std::memory_order_acquire));
}
template <auto kFunction>
decltype(kFunction) real_nvml() noexcept {
  load_nvml();
  return reinterpret_cast<decltype(kFunction)>(real_address<kFunction>.load(std::memory_order_acquire));
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
