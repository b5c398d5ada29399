#pragma once

#include <cuda.h>

namespace ebbtide::preload {

// A program that made a context of its own has its work there; the core waits for the primary one by itself. The calling thread's context, or null where it is the device's primary one.
CUcontext own_context(int device);

}  // namespace ebbtide::preload
