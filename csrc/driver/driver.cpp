#include "driver/driver.h"

#include <dlfcn.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/own_library.h"
#include "base/settings.h"
#include "driver/hip.h"

namespace ebbtide {
namespace {

constinit std::mutex choosing;
// Written under the mutex; read without it, which may be held for as long as a driver starts.
constinit std::atomic<DriverKind> kind_in_use{DriverKind::kNone};
constinit std::atomic<const Driver*> loaded_driver{nullptr};
constinit std::atomic<bool> is_of_hip{false};

using GetProcAddress = CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);

std::string library_file(DriverKind kind) {
  if (kind == DriverKind::kCuda) return "libcuda.so.1";
  const OwnLibrary own = own_library();
  return own.folder + (own.is_torch_memory_savers() ? "../../" : "") + "libebbtide_sim.so";
}

void* open_library(DriverKind kind) {
  if (kind == DriverKind::kHip) {
    if (void* library = open_hip_library()) return library;
    const char* reason = ::dlerror();
    throw StateError("no HIP: " + std::string(reason != nullptr ? reason : "libamdhip64.so") +
                     ". Import a torch that is built for ROCm first, install ROCm, or set EBBTIDE_DRIVER=sim for the "
                     "simulated device or EBBTIDE_DRIVER=off to do nothing");
  }
  const std::string file = library_file(kind);
  void* library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return library;
  const char* reason = ::dlerror();
  if (kind == DriverKind::kCuda) {
    throw StateError("no CUDA driver: " + std::string(reason != nullptr ? reason : file) +
                     ". Install the NVIDIA driver, or set EBBTIDE_DRIVER=sim for the simulated device or "
                     "EBBTIDE_DRIVER=off to do nothing");
  }
  throw StateError("the simulated driver can't be opened: " + std::string(reason != nullptr ? reason : file) +
                   ". Install ebbtide anew");
}

void resolve_all(GetProcAddress get_proc_address, Driver& table) {
  std::string missing;
  const auto resolve = [&](const char* name, int version, bool is_required, void** function) {
    CUdriverProcAddressQueryResult status{};
    const CUresult result = get_proc_address(name, function, version, CU_GET_PROC_ADDRESS_DEFAULT, &status);
    if (result == CUDA_SUCCESS && *function != nullptr) return;
    *function = nullptr;
    if (is_required) missing += (missing.empty() ? "" : ", ") + std::string(name);
  };
  constexpr bool required = true;
  constexpr bool optional = false;
#define EBBTIDE_FUNCTION(name, version, need, hip_name, how) \
  resolve(#name, version, need, reinterpret_cast<void**>(&table.name));
#include "driver/functions.def"
#undef EBBTIDE_FUNCTION
  if (!missing.empty()) {
    throw StateError("the CUDA driver lacks " + missing +
                     ": ebbtide needs the driver of CUDA 12.0 (525.60) or newer; update the NVIDIA driver");
  }
}

Driver resolve_cuda(void* library) {
  void* symbol = ::dlsym(library, "cuGetProcAddress_v2");
  if (symbol == nullptr) {
    throw StateError(
        "the CUDA driver is older than CUDA 12.0 (it has no cuGetProcAddress_v2): update the NVIDIA driver to 525.60 "
        "or newer");
  }
  Driver table;
  resolve_all(reinterpret_cast<GetProcAddress>(symbol), table);
  return table;
}

[[noreturn]] void throw_start_error(const Driver& table, DriverKind kind, CUresult result) {
  const char* text = nullptr;
  table.cuGetErrorString(result, &text);
  rlimit files{};
  const bool is_limited = ::getrlimit(RLIMIT_FSIZE, &files) == 0 && files.rlim_max != RLIM_INFINITY;
  const bool is_sim = is_driver_simulated();
  const char* const name = kind == DriverKind::kHip ? "hipInit" : "cuInit";
  if (is_sim && is_limited) {
    throw DriverError(
        "the simulated device does not start: its memory is a file of 1 PiB, and the limit on the size of files is " +
            format_bytes(files.rlim_max) + ". Raise it (`ulimit -f unlimited`)",
        name, result, "flags=0");
  }
  const char* const what = is_sim ? "the simulated device" : kind == DriverKind::kHip ? "HIP" : "the CUDA driver";
  const char* const where = is_sim                     ? "EBBTIDE_SIM_DEVICES and EBBTIDE_SIM_CAPACITY"
                            : kind == DriverKind::kHip ? "`rocm-smi` and HIP_VISIBLE_DEVICES"
                                                       : "`nvidia-smi` and CUDA_VISIBLE_DEVICES";
  throw DriverError(std::string(what) + " does not start: " + name + " gives " + std::to_string(result) +
                        (text != nullptr ? " (" + std::string(text) + ")" : "") + ". Look at " + where +
                        "; `ebbtide doctor` says more",
                    name, result, "flags=0");
}

const Driver* load(DriverKind kind) {
  void* library = open_library(kind);
  const bool is_hip = kind == DriverKind::kHip || (kind == DriverKind::kSim && read_variable(Setting::kSimHip) == "1");
  const Driver table = is_hip ? resolve_hip(library) : resolve_cuda(library);
  if (const CUresult result = table.cuInit(0); result != CUDA_SUCCESS) throw_start_error(table, kind, result);
  is_of_hip.store(is_hip);
  return new Driver(table);
}

// choice: in its plain form.
DriverKind kind_from_choice(const std::string& choice) {
  if (choice == "off") throw StateError("EBBTIDE_DRIVER=off: ebbtide is switched off, there is no device to use");
  return choice == "sim" ? DriverKind::kSim : choice == "hip" ? DriverKind::kHip : DriverKind::kCuda;
}

DriverKind kind_from_name(const char* name) {
  const SettingFacts& facts = facts_of(Setting::kDriver);
  if (name != nullptr && *name != '\0') return kind_from_choice(check_setting(facts, name, "the driver"));
  const char* text = variable_text(Setting::kDriver);
  return kind_from_choice(text == nullptr ? "auto" : check_setting(facts, text, facts.variable));
}

}  // namespace

void use_driver(const char* name) {
  const DriverKind kind = kind_from_name(name);
  const std::lock_guard lock(choosing);
  if (loaded_driver.load() != nullptr && kind_in_use != kind) {
    throw StateError(std::string("the driver of this process is already ") + driver_name() +
                     ": set EBBTIDE_DRIVER before the first use");
  }
  kind_in_use = kind;
}

DriverKind driver_kind() noexcept { return kind_in_use.load(); }

const char* driver_name() noexcept {
  constexpr const char* kNames[] = {"", "cuda", "hip", "sim"};
  return kNames[static_cast<size_t>(driver_kind())];
}

bool speaks_hip() noexcept { return is_of_hip.load(); }

bool is_driver_simulated() noexcept {
  if (driver_kind() == DriverKind::kSim) return true;
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return library != nullptr && ::dlsym(library, "ebbtide_sim_reset") != nullptr;
}

const Driver* driver_if_loaded() noexcept { return loaded_driver.load(std::memory_order_acquire); }

const Driver& driver() {
  if (const Driver* table = loaded_driver.load(std::memory_order_acquire)) return *table;
  const std::lock_guard lock(choosing);
  if (const Driver* table = loaded_driver.load()) return *table;
  // No driver was chosen explicitly, and a caller that wants a device does not expect an error about a variable. So
  // that goes to stderr.
  if (kind_in_use == DriverKind::kNone)
    kind_in_use = kind_from_choice(read_variable(Setting::kDriver).value_or("auto"));
  const Driver* table = load(kind_in_use);
  loaded_driver.store(table, std::memory_order_release);
  return *table;
}

CUdevice device_handle(int device) {
  CUdevice handle = 0;
  check(driver().cuDeviceGet(&handle, device), "cuDeviceGet", "ordinal=" + std::to_string(device));
  return handle;
}

int device_attribute(int device, CUdevice_attribute which) {
  int value = 0;
  check(driver().cuDeviceGetAttribute(&value, which, device_handle(device)), "cuDeviceGetAttribute",
        "attribute=" + std::to_string(which));
  return value;
}

std::optional<int> find_attribute(int device, CUdevice_attribute which) {
  try {
    return device_attribute(device, which);
  } catch (const DriverError&) {
    return std::nullopt;
  }
}

const char* result_name(CUresult result) noexcept {
  const Driver* table = driver_if_loaded();
  const char* name = nullptr;
  return table != nullptr && table->cuGetErrorName(result, &name) == CUDA_SUCCESS && name != nullptr
             ? name
             : "an error without a name";
}

const char* name_in_use(const char* function) noexcept {
  if (!speaks_hip()) return function;
  static constexpr std::pair<std::string_view, const char*> kNames[] = {
#define EBBTIDE_FUNCTION(name, version, need, hip_name, how) {#name, #hip_name},
#include "driver/functions.def"
#undef EBBTIDE_FUNCTION
  };
  const auto found =
      std::find_if(std::begin(kNames), std::end(kNames), [&](const auto& row) { return row.first == function; });
  return found == std::end(kNames) ? function : found->second;
}

void throw_driver_error(const char* call, CUresult result, const std::string& arguments) {
  throw DriverError(std::string(name_in_use(call)) + "(" + arguments + ") failed with " + result_name(result) + " (" +
                        std::to_string(result) + ")",
                    call, result, arguments);
}

}  // namespace ebbtide
