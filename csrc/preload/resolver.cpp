#include "preload/resolver.h"

#include <dlfcn.h>

#include <cstring>
#include <span>
#include <string_view>

#include "base/settings.h"

namespace ebbtide::preload {
namespace {

// Plain pointers to variables: a table of atomics would need a constructor.
struct Function {
  const char* symbol;
  void* hook;  // null: not hooked
  std::atomic<void*>* real;
  // For the driver only: the name passed to cuGetProcAddress, and its answer. It is normally the same function as the
  // one found by symbol; it differs if a preloaded library hooks only one of the two ways.
  const char* name;
  int version;
  cuuint64_t flags;
  std::atomic<void*>* resolved;
};

template <auto kFunction>
constinit std::atomic<void*> resolved_address{nullptr};

const Function kDriverFunctions[] = {
#define EBBTIDE_DRIVER_HOOK(symbol, name, version, flags)                             \
  {#symbol, reinterpret_cast<void*>(&symbol), &real_address<&symbol>, #name, version, \
   flags,   &resolved_address<&symbol>},
#define EBBTIDE_DRIVER_REAL(symbol) {#symbol, nullptr, &real_address<&symbol>, nullptr, 0, 0, nullptr},
#include "preload/hooks.def"
};

const Function kNvmlFunctions[] = {
#define EBBTIDE_NVML_HOOK(symbol) \
  {#symbol, reinterpret_cast<void*>(&symbol), &real_address<&symbol>, nullptr, 0, 0, nullptr},
#define EBBTIDE_NVML_REAL(symbol) {#symbol, nullptr, &real_address<&symbol>, nullptr, 0, 0, nullptr},
#include "preload/hooks.def"
};

constinit std::atomic<bool> is_driver_known{false};
constinit std::atomic<bool> is_nvml_known{false};

using Resolve = CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);

void resolve_all(Resolve resolve) noexcept {
  for (const Function& function : kDriverFunctions) {
    if (function.name == nullptr) continue;
    void* found = nullptr;
    if (resolve(function.name, &found, function.version, function.flags, nullptr) == CUDA_SUCCESS)
      function.resolved->store(found, std::memory_order_release);
  }
}

bool load(const char* file, std::span<const Function> functions) noexcept {
  const NoCancel no_cancel;
  const FindSymbol find = next_dlsym();
  void* library = find != nullptr ? ::dlopen(file, RTLD_LAZY | RTLD_LOCAL) : nullptr;
  if (library == nullptr) return false;
  for (const Function& function : functions)
    function.real->store(find(library, function.symbol), std::memory_order_release);
  return true;
}

const Function* find_hooked(std::span<const Function> functions, const char* symbol) noexcept {
  for (const Function& function : functions) {
    if (function.hook != nullptr && std::strcmp(function.symbol, symbol) == 0) return &function;
  }
  return nullptr;
}

}  // namespace

bool load_driver() noexcept {
  if (is_driver_known.load(std::memory_order_acquire)) return true;
  if (!load("libcuda.so.1", kDriverFunctions)) return false;
  if (void* resolve = real_address<&cuGetProcAddress_v2>.load()) resolve_all(reinterpret_cast<Resolve>(resolve));
  is_driver_known.store(true, std::memory_order_release);
  return true;
}

bool load_nvml() noexcept {
  if (is_nvml_known.load(std::memory_order_acquire)) return true;
  if (!load("libnvidia-ml.so.1", kNvmlFunctions)) return false;
  is_nvml_known.store(true, std::memory_order_release);
  return true;
}

bool is_hooked_name(const char* symbol) noexcept {
  const std::string_view name = symbol;
  if (!name.starts_with("cu") && !name.starts_with("nvml")) return false;
  return find_hooked(kDriverFunctions, symbol) != nullptr || find_hooked(kNvmlFunctions, symbol) != nullptr;
}

void* hook_of_symbol(const char* symbol, const void* found) noexcept {
  const Function* function = find_hooked(kDriverFunctions, symbol);
  const bool is_driver = function != nullptr;
  if (!is_driver) function = find_hooked(kNvmlFunctions, symbol);
  if (function == nullptr || !(is_driver ? load_driver() : load_nvml())) return nullptr;
  return found == function->real->load(std::memory_order_acquire) ? function->hook : nullptr;
}

void* substitute(void* function) noexcept {
  load_driver();
  for (const Function& known : kDriverFunctions) {
    if (known.hook == nullptr) continue;
    if (function == known.real->load(std::memory_order_acquire) ||
        function == known.resolved->load(std::memory_order_acquire))
      return known.hook;
  }
  return function;
}

bool is_active() noexcept {
  static constinit std::atomic<int> known{-1};
  int active = known.load(std::memory_order_relaxed);
  if (active >= 0) return active == 1;
  constexpr int kHip = 2;  // of EBBTIDE_DRIVER: auto, cuda, hip, sim, off
  active = word_index(Setting::kDriver) >= kHip ? 0 : 1;
  known.store(active, std::memory_order_relaxed);
  return active == 1;
}

}  // namespace ebbtide::preload
