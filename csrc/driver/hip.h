// The same table over HIP's names, for AMD's GPUs: most functions of HIP take what CUDA's take.
//
// Relied on, by the headers of HIP 7.1 (tests/law/test_hip_names.py): libamdhip64 exports the functions of
// functions.def under their plain names, with results, flags and structures of the same values and sizes. Those of HIP
// 5 differ. A device has no contexts there: each thread has a current device, which is 0 where it has set none.
// hipModuleLoadData takes an offload bundle of clang and chooses the code object by the current device (FatBinaryInfo
// in HIP's sources).
#pragma once

#include "driver/driver.h"

namespace ebbtide {

// Of HIP's library, or of the simulator, which has its names, too. Throws StateError where a function is missing, or it
// is older than 6.0.
Driver resolve_hip(void* library);

// A library that the process has loaded already, as torch has its own, or the system's. The reason on failure is
// dlerror's.
void* open_hip_library();

}  // namespace ebbtide
