/* Another preload library. It hooks two functions of the driver and dlsym, as most such libraries do, and counts the
 * calls that it sees. */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static int seen;

CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  CUresult (*next)(size_t*, size_t*) = (CUresult (*)(size_t*, size_t*))dlsym(RTLD_NEXT, "cuMemGetInfo_v2");
  if (next == NULL || next == &cuMemGetInfo_v2) return CUDA_ERROR_UNKNOWN;
  ++seen;
  return next(free_bytes, total);
}

__attribute__((destructor)) static void tell(void) { fprintf(stderr, "chain: %d\n", seen); }
