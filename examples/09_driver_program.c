/* A program of CUDA's driver API that knows nothing of ebbtide: it fills six buffers of 64 MiB, and reads them back. */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>

enum { COUNT = 6, MIB = 1 << 20, BYTES = 64 * MIB };

static void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  fprintf(stderr, "%s failed: %d\n", what, result);
  exit(EXIT_FAILURE);
}

int main(void) {
  CUdevice device;
  CUcontext context;
  size_t total;
  char name[64];
  check(cuInit(0), "cuInit");
  check(cuDeviceGet(&device, 0), "cuDeviceGet");
  check(cuDeviceGetName(name, sizeof name, device), "cuDeviceGetName");
  check(cuDeviceTotalMem(&total, device), "cuDeviceTotalMem");
  check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
  printf("device 0: %s, %zu MiB\n", name, total / MIB);

  CUdeviceptr buffers[COUNT];
  for (unsigned i = 0; i < COUNT; ++i) {
    check(cuMemAlloc(&buffers[i], BYTES), "cuMemAlloc");
    check(cuMemsetD32(buffers[i], i, BYTES / 4), "cuMemsetD32");
  }
  for (unsigned i = 0; i < COUNT; ++i) {
    unsigned last;
    check(cuMemcpyDtoH(&last, buffers[i] + BYTES - 4, 4), "cuMemcpyDtoH");
    if (last != i) return EXIT_FAILURE;
    check(cuMemFree(buffers[i]), "cuMemFree");
  }
  printf("%d buffers of %d MiB held what was written\n", COUNT, BYTES / MIB);
  return EXIT_SUCCESS;
}
