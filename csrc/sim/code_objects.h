// What HIP loads in place of PTX: clang's offload bundle, which holds an ELF file for each architecture.
#pragma once

#include <cuda.h>

#include <set>
#include <string>

namespace ebbtide::sim {

// The architecture that a simulated device has for HIP: MI300's.
inline constexpr char kArchitecture[] = "gfx942";

// Reads the kernels' names of the code object for kArchitecture. Returns an error if HIP would refuse the bundle.
CUresult read_code_objects(const char* bundle, std::set<std::string>& entries);

}  // namespace ebbtide::sim
