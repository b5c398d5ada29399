"""Programs of the driver API for test_cli_run_simulate.py. Each is C, behind PRELUDE."""

# What the programs below begin with. `find` takes a function from the driver as it was opened.
PRELUDE = """
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#define MIB ((size_t)1 << 20)
#define CHECK(call) if ((call) != CUDA_SUCCESS) { fprintf(stderr, "line %d: %s\\n", __LINE__, #call); exit(9); }

__attribute__((unused)) static void start(void) {
  CUcontext context;
  CHECK(cuInit(0));
  CHECK(cuDevicePrimaryCtxRetain(&context, 0));
  CHECK(cuCtxSetCurrent(context));
}
"""

OWN_CONTEXTS = """
typedef CUresult (*Create)(CUcontext*, unsigned, CUdevice);
typedef CUresult (*CreateOn)(CUcontext*, void*, int, unsigned, CUdevice);
typedef CUresult (*CreateNow)(CUcontext*, void*, unsigned, CUdevice);

int main(void) {
  CUcontext first, second, third, current;
  Create create;
  CreateOn create_on;
  CreateNow create_now;
  CHECK(cuInit(0));
  CHECK(cuGetProcAddress("cuCtxCreate", (void**)&create, 11030, 0, NULL));
  CHECK(cuGetProcAddress("cuCtxCreate", (void**)&create_on, 12000, 0, NULL));
  CHECK(cuGetProcAddress("cuCtxCreate", (void**)&create_now, 13000, 0, NULL));
  CHECK(create_on(&third, NULL, 0, CU_CTX_SCHED_AUTO, 0));
  CHECK(cuCtxDestroy(third));
  CHECK(create(&first, CU_CTX_SCHED_AUTO, 0));
  CHECK(create_now(&second, NULL, 0, 0));
  CHECK(cuCtxPopCurrent(&current));
  CHECK(cuCtxGetCurrent(&current));
  if (current != first) return 2;

  enum { COUNT = 6 };
  CUdeviceptr buffers[COUNT], copy;
  void* host;
  CHECK(cuMemAllocHost(&host, 4096));
  for (int i = 0; i < COUNT; ++i) {
    CHECK(cuMemAlloc(&buffers[i], 16 * MIB));
    CHECK(cuMemsetD8(buffers[i], 'a' + i, 8 * MIB));
    CHECK(cuMemsetD16(buffers[i] + 8 * MIB, 0x0101 * ('a' + i), 4 * MIB));
  }
  CHECK(cuMemAlloc(&copy, 16 * MIB));
  for (int i = 0; i < COUNT; ++i) {
    char last;
    CHECK(cuMemcpyDtoD(copy, buffers[i], 16 * MIB));
    CHECK(cuMemcpy((CUdeviceptr)host, copy + 16 * MIB - 4096, 4096));
    CHECK(cuMemcpyDtoH(&last, copy + 16 * MIB - 1, 1));
    if (last != 'a' + i || ((char*)host)[17] != last) return 3;
  }
  for (int i = 0; i < COUNT; ++i) CHECK(cuMemFree(buffers[i]));
  CHECK(cuCtxDestroy(first)); /* with the copy, if that is the driver's, and the host memory */
  if (cuCtxSynchronize() != CUDA_ERROR_INVALID_CONTEXT) return 4;
  CHECK(cuCtxPushCurrent(second));
  CHECK(cuCtxSynchronize());
  if (cuMemFree(copy) == CUDA_SUCCESS) puts("kept");
  CHECK(cuCtxDestroy(second));
  return puts("whole") < 0;
}"""

PAUSE = """
#include <ebbtide.h>

int main(void) {
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  ebbtide_report* report = NULL;
  ebbtide_report_totals totals = {0};
  CUdeviceptr buffer;
  size_t before, away, total;
  unsigned word = 0;
  start();
  CHECK(cuMemAlloc(&buffer, 32 * MIB));
  CHECK(cuMemsetD32(buffer, 7, 8 * MIB));
  CHECK(cuCtxSynchronize());
  CHECK(cuMemGetInfo(&before, &total));
  if (ebbtide_pause(EBBTIDE_TAG("job"), &report, &error)) return fprintf(stderr, "%s\\n", error.message), 1;
  if (ebbtide_read_report(report, &totals, &error)) return 2;
  ebbtide_free_report(report);
  CHECK(cuMemGetInfo(&away, &total));
  if (ebbtide_resume(EBBTIDE_TAG("job"), NULL, &error)) return 3;
  CHECK(cuMemcpyDtoH(&word, buffer + 32 * MIB - 4, 4));
  printf("%s %zu %zu %u\\n", ebbtide_driver_name(), (size_t)totals.sum.bytes / MIB, (away - before) / MIB, word);
  return 0;
}"""

OPENER = """
int main(int count, char** words) {
  void* library = dlopen(words[1], RTLD_NOW);
  if (library == NULL) return fprintf(stderr, "%s\\n", dlerror()), 1;
  CUresult (*init)(unsigned) = (CUresult (*)(unsigned))dlsym(library, "cuInit");
  CUresult (*resolve)(const char*, void**, int, cuuint64_t, void*) = dlsym(library, "cuGetProcAddress_v2");
  CUresult (*total)(size_t*, CUdevice) = NULL;
  CHECK(init(0));
  CHECK(resolve("cuDeviceTotalMem", (void**)&total, 12000, 0, NULL));
  size_t bytes = 0;
  CHECK(total(&bytes, 0));
  printf("%zu\\n", bytes / MIB);
  return dlsym(library, "cuMemcpy2D_v2") != NULL; /* what the device lacks is missing, and not broken */
}"""

ASKS_AS_THE_RUNTIME = """int main(void) {
  void* table = NULL;
  start();
  for (int i = 0; i < 2; ++i) CHECK(cuGetProcAddress("cuGetExportTable", &table, 12000, 0, NULL));
  return table != NULL;
}"""

LAUNCHES = """int main(void) {
  const char* ptx = ".version 8.0\\n.target sm_52\\n.address_size 64\\n.visible .entry add(){ret;}\\n";
  CUmodule module;
  CUfunction add;
  start();
  CHECK(cuModuleLoadDataEx(&module, ptx, 0, NULL, NULL));
  CHECK(cuModuleGetFunction(&add, module, "add"));
  cuLaunchKernel(add, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
  return cuLaunchKernel(add, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL) != CUDA_ERROR_NOT_SUPPORTED;
}"""

FORKS = """static int in_child(CUresult expected) {
  int status = 0;
  if (fork() == 0) _exit(cuInit(0) == expected ? 0 : 1);
  wait(&status);
  return status;
}
int main(void) {
  if (in_child(CUDA_SUCCESS) != 0) return 1;
  start();
  return in_child(CUDA_ERROR_NOT_INITIALIZED) != 0;
}"""
