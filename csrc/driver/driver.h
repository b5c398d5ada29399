#pragma once

#include <cuda.h>

#include <optional>
#include <string>

// The table of driver functions. Nothing here links libcuda: it is opened at first use, under the name that use_driver
// chose.
//
// Relied on: libcuda.so.1 of CUDA 12.0 and later exports cuGetProcAddress_v2, which answers each name at the requested
// version. So one binary works with all later drivers.
namespace ebbtide {

struct Driver {
#define EBBTIDE_FUNCTION(name, version, need, hip_name, how) decltype(&::name) name = nullptr;
#include "driver/functions.def"
#undef EBBTIDE_FUNCTION
};

enum class DriverKind { kNone, kCuda, kHip, kSim };

// Chooses the library for driver(). Throws StateError once another kind is loaded, InvalidArgument for an unknown name.
// name: "cuda", "hip", "sim", or null for EBBTIDE_DRIVER ("auto" and unset mean "cuda").
void use_driver(const char* name);
DriverKind driver_kind() noexcept;
const char* driver_name() noexcept;
// Whether the loaded table is that of HIP's names.
bool speaks_hip() noexcept;
// Whether the kind is kSim, or libcuda.so.1 is the simulator under the driver's name. Loads no table.
bool is_driver_simulated() noexcept;

// The loaded table. The first call opens the library, resolves every function and calls cuInit. Throws StateError if
// there is no library, if it is too old, or if a required function is missing; it may be called again after that. The
// reference stays valid for ever.
const Driver& driver();

// The loaded table or null: for paths that must not load anything (exit, reporting).
const Driver* driver_if_loaded() noexcept;

// Throws DriverError for result != CUDA_SUCCESS. arguments: "ptr=0x.., size=..".
[[noreturn]] void throw_driver_error(const char* call, CUresult result, const std::string& arguments);
inline void check(CUresult result, const char* call, const std::string& arguments = "") {
  if (result != CUDA_SUCCESS) throw_driver_error(call, result, arguments);
}
// Throw DriverError.
CUdevice device_handle(int device);
int device_attribute(int device, CUdevice_attribute which);
// Empty where the driver knows no such device, or not the attribute: then it lacks the capability.
std::optional<int> find_attribute(int device, CUdevice_attribute which);
// Whether nothing is left to give back after this result of a call that undoes another one: the driver's end undoes
// all.
inline bool is_undone(CUresult result) noexcept { return result == CUDA_SUCCESS || result == CUDA_ERROR_DEINITIALIZED; }
// A function as the loaded driver names it: cuMemCreate, or HIP's hipMemCreate.
const char* name_in_use(const char* function) noexcept;
// "CUDA_ERROR_OUT_OF_MEMORY"; needs no memory.
const char* result_name(CUresult result) noexcept;

}  // namespace ebbtide
