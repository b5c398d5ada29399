#pragma once

#include <cuda.h>

namespace ebbtide::preload {

// The calling thread's context, or null if it is the device's primary one. A program that made its own context has its
// work there, and the core itself waits only for the primary one.
CUcontext own_context(int device);

}  // namespace ebbtide::preload
