/* The driver functions that a client has found, as a table. */
#ifndef EBBTIDE_PRELOAD_CLIENT_API_H
#define EBBTIDE_PRELOAD_CLIENT_API_H

#include <cuda.h>
#undef cuGetProcAddress

/* The name as in cuda.h, whose macros turn it into the exported symbol, and the versions for cuGetProcAddress: without
 * and with the flag of per-thread default streams, whose variants came with CUDA 7. */
#define EVERY_FUNCTION(X)                      \
  X(cuInit, 2000, 2000)                        \
  X(cuDeviceGet, 2000, 2000)                   \
  X(cuDeviceTotalMem, 3020, 3020)              \
  X(cuDevicePrimaryCtxRetain, 7000, 7000)      \
  X(cuCtxSetCurrent, 4000, 4000)               \
  X(cuCtxSynchronize, 2000, 2000)              \
  X(cuCtxEnablePeerAccess, 4000, 4000)         \
  X(cuDeviceCanAccessPeer, 4000, 4000)         \
  X(cuMemcpyDtoDAsync, 3020, 7000)             \
  X(cuMemGetInfo, 3020, 3020)                  \
  X(cuMemAlloc, 3020, 3020)                    \
  X(cuMemAllocPitch, 3020, 3020)               \
  X(cuMemFree, 3020, 3020)                     \
  X(cuMemAllocManaged, 6000, 6000)             \
  X(cuDeviceGetDefaultMemPool, 11020, 11020)   \
  X(cuMemAllocAsync, 11020, 11020)             \
  X(cuMemAllocFromPoolAsync, 11020, 11020)     \
  X(cuMemFreeAsync, 11020, 11020)              \
  X(cuMemCreate, 10020, 10020)                 \
  X(cuMemRelease, 10020, 10020)                \
  X(cuMemRetainAllocationHandle, 11000, 11000) \
  X(cuMemAddressReserve, 10020, 10020)         \
  X(cuMemAddressFree, 10020, 10020)            \
  X(cuMemMap, 10020, 10020)                    \
  X(cuMemUnmap, 10020, 10020)                  \
  X(cuMemSetAccess, 10020, 10020)              \
  X(cuMemGetAddressRange, 3020, 3020)          \
  X(cuPointerGetAttribute, 4000, 4000)         \
  X(cuPointerGetAttributes, 7000, 7000)        \
  X(cuIpcGetMemHandle, 4010, 4010)             \
  X(cuMemcpyHtoD, 3020, 7000)                  \
  X(cuMemcpyDtoH, 3020, 7000)                  \
  X(cuMemcpyHtoDAsync, 3020, 7000)             \
  X(cuStreamCreate, 2000, 2000)                \
  X(cuStreamDestroy, 4000, 4000)               \
  X(cuStreamSynchronize, 2000, 7000)           \
  X(cuStreamBeginCapture, 10010, 10010)        \
  X(cuStreamEndCapture, 10000, 10000)          \
  X(cuGraphDestroy, 10000, 10000)

struct api {
#define MEMBER(name, version, per_thread_version) __typeof__(&name) name;
  EVERY_FUNCTION(MEMBER)
#undef MEMBER
};

/* 0 if every function was found. */
int resolve(const char* way, struct api* api);
/* The exit status: 0 for success, 1 for an unexpected result, 2 for out of memory. */
int run_action(const struct api* api, int count, char** words);

#define TEXT_OF(symbol) #symbol
#define SYMBOL(name) TEXT_OF(name) /* the exported name, through cuda.h's macros */

#endif
