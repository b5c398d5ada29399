#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "sim/control.h"

// The simulator's control functions. The tests never link the simulator: they open it as the core does, so that both
// use one copy.
namespace ebbtide::testing {

// Codes that tests make calls give: out of memory, and any other.
inline constexpr int kOutOfMemory = 2;
inline constexpr int kOther = 999;

// Whether the tests call the simulator by HIP's names.
inline bool is_hip() {
  const char* const text = std::getenv("EBBTIDE_SIM_HIP");
  return text != nullptr && std::strcmp(text, "1") == 0;
}

struct SimControl {
#define EBBTIDE_SIM_CONTROL(name) std::add_pointer_t<decltype(::ebbtide_sim_##name)> name = nullptr;
  // clang-format off: it never settles on one layout for this list
#define EBBTIDE_SIM_CONTROLS \
  EBBTIDE_SIM_CONTROL(reset) \
  EBBTIDE_SIM_CONTROL(set_device_count) \
  EBBTIDE_SIM_CONTROL(set_driver_version) \
  EBBTIDE_SIM_CONTROL(set_capacity) \
  EBBTIDE_SIM_CONTROL(set_peers) \
  EBBTIDE_SIM_CONTROL(hide_function) \
  EBBTIDE_SIM_CONTROL(fail) \
  EBBTIDE_SIM_CONTROL(clear_failures) \
  EBBTIDE_SIM_CONTROL(set_async) \
  EBBTIDE_SIM_CONTROL(set_delay) \
  EBBTIDE_SIM_CONTROL(live) \
  EBBTIDE_SIM_CONTROL(calls) \
  EBBTIDE_SIM_CONTROL(log) \
  EBBTIDE_SIM_CONTROL(clear_log) \
  EBBTIDE_SIM_CONTROL(set_foreign_bytes)
  // clang-format on
  EBBTIDE_SIM_CONTROLS
#undef EBBTIDE_SIM_CONTROL
};

inline const SimControl& sim() {
  static const SimControl control = [] {
    void* library = ::dlopen(EBBTIDE_SIM_PATH, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      std::fprintf(stderr, "%s\n", ::dlerror());
      std::abort();
    }
    SimControl found;
#define EBBTIDE_SIM_CONTROL(name) \
  found.name = reinterpret_cast<decltype(found.name)>(::dlsym(library, "ebbtide_sim_" #name));
    EBBTIDE_SIM_CONTROLS
#undef EBBTIDE_SIM_CONTROL
    return found;
  }();
  return control;
}

}  // namespace ebbtide::testing
