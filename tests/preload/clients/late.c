/* A library that is loaded before ours and unloaded after it. It allocates memory in its constructor and frees it in
 * its destructor. */
#include <cuda.h>
#include <stdio.h>

static CUdeviceptr address;

__attribute__((constructor)) static void take(void) {
  CUcontext context = NULL;
  cuInit(0);
  cuDevicePrimaryCtxRetain(&context, 0);
  cuCtxSetCurrent(context);
  fprintf(stderr, "late: took %d\n", (int)cuMemAlloc(&address, (size_t)32 << 20));
}

__attribute__((destructor)) static void give_back(void) {
  size_t free_bytes = 0, total = 0;
  const int freed = (int)cuMemFree(address);
  const int told = (int)cuMemGetInfo(&free_bytes, &total);
  fprintf(stderr, "late: freed %d, asked %d, %zu of %zu\n", freed, told, free_bytes, total);
}
