#pragma once

#include <cuda.h>

#include "preload/nvml.h"
#undef cuGetProcAddress

#define EBBTIDE_HOOK_EXPORT extern "C" __attribute__((visibility("default")))

// Functions that cuda.h does not declare under the name that the library exports: the older form of the resolver, and
// the functions of per-thread default streams.
EBBTIDE_HOOK_EXPORT CUresult cuGetProcAddress(const char* symbol, void** function, int version, cuuint64_t flags);
EBBTIDE_HOOK_EXPORT decltype(cuMemAllocAsync) cuMemAllocAsync_ptsz;
EBBTIDE_HOOK_EXPORT decltype(cuMemAllocFromPoolAsync) cuMemAllocFromPoolAsync_ptsz;
EBBTIDE_HOOK_EXPORT decltype(cuMemFreeAsync) cuMemFreeAsync_ptsz;
EBBTIDE_HOOK_EXPORT decltype(cuStreamBeginCapture_v2) cuStreamBeginCapture_v2_ptsz;
EBBTIDE_HOOK_EXPORT decltype(cuStreamEndCapture) cuStreamEndCapture_ptsz;
#if CUDA_VERSION >= 12030
EBBTIDE_HOOK_EXPORT decltype(cuStreamBeginCaptureToGraph) cuStreamBeginCaptureToGraph_ptsz;
#endif
