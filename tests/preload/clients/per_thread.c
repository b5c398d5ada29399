/* per_thread ACTION SIZE: a program that was compiled for per-thread default streams, or that captures into its own
 * graph. It looks each variant up by name. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "steps.h"

static void* library;
static void* find(const char* name) {
  void* const found = dlsym(library, name);
  if (found == NULL) fprintf(stderr, "client: no %s\n", name);
  return found;
}

typedef CUresult (*begin_function)(CUstream, CUstreamCaptureMode);
typedef CUresult (*begin_in_graph)(CUstream, CUgraph, const CUgraphNode*, const CUgraphEdgeData*, size_t,
                                   CUstreamCaptureMode);
static CUgraph const own_graph = (CUgraph)16;

/* Begins the capture of a stream by one of four functions. A wrong mode begins none. */
static CUresult begin(const char* name, CUstream stream, CUstreamCaptureMode mode) {
  void* const function = find(name);
  if (strstr(name, "ToGraph") == NULL) return ((begin_function)function)(stream, mode);
  return ((begin_in_graph)function)(stream, own_graph, NULL, NULL, 0, mode);
}

static size_t free_bytes(void) {
  size_t free = 0, total = 0;
  return cuMemGetInfo(&free, &total) == CUDA_SUCCESS ? free : 0;
}

/* The memory that a freed spill still takes. */
static size_t lost_by_a_free(size_t size) {
  CUdeviceptr address = 0;
  const size_t before = free_bytes();
  if (cuMemAlloc(&address, size) != CUDA_SUCCESS || cuMemFree(address) != CUDA_SUCCESS) return 1;
  return before - free_bytes();
}

static int capture_by(const char* name, const char* end_name, CUstream stream, size_t size) {
  CUresult (*end)(CUstream, CUgraph*) = NULL;
  CUgraph graph = NULL;
  const size_t before = free_bytes();
  *(void**)&end = find(end_name);
  REQUIRE(begin(name, stream, (CUstreamCaptureMode)99) != CUDA_SUCCESS);
  REQUIRE(lost_by_a_free(size) == 0);
  TRY(begin(name, stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  REQUIRE(lost_by_a_free(size) != 0);
  REQUIRE(begin(name, stream, CU_STREAM_CAPTURE_MODE_RELAXED) != CUDA_SUCCESS);
  TRY(end(stream, &graph));
  TRY(cuGraphDestroy(graph));
  REQUIRE(free_bytes() == before && lost_by_a_free(size) == 0);
  return 0;
}

static int capture(size_t size) {
  CUstream stream = NULL;
  TRY(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  const char* const both[] = {"cuStreamBeginCapture_v2", "cuStreamBeginCaptureToGraph"};
  const char* const per_thread[] = {"cuStreamBeginCapture_v2_ptsz", "cuStreamBeginCaptureToGraph_ptsz"};
  int status = 0;
  for (int i = 0; i < 2 && status == 0; ++i) {
    status = capture_by(both[i], "cuStreamEndCapture", stream, size);
    if (status == 0) status = capture_by(per_thread[i], "cuStreamEndCapture_ptsz", stream, size);
    /* Null is the thread's own stream, whichever variant ends the capture. */
    if (status == 0) status = capture_by(per_thread[i], "cuStreamEndCapture_ptsz", NULL, size);
  }
  return status;
}

/* Stream-ordered memory of the thread's default stream. Beyond the limit, it comes from ebbtide. While that stream
 * captures, it is left to the driver. */
static int allocate_in_order(size_t size) {
  CUresult (*take)(CUdeviceptr*, size_t, CUstream) = NULL;
  CUresult (*take_from_pool)(CUdeviceptr*, size_t, CUmemoryPool, CUstream) = NULL;
  CUresult (*give_back)(CUdeviceptr, CUstream) = NULL;
  *(void**)&take = find("cuMemAllocAsync_ptsz");
  *(void**)&take_from_pool = find("cuMemAllocFromPoolAsync_ptsz");
  *(void**)&give_back = find("cuMemFreeAsync_ptsz");
  CUdeviceptr address = 0, other = 0;
  CUmemoryPool pool = NULL;
  CUgraph graph = NULL;
  TRY(cuDeviceGetDefaultMemPool(&pool, 0));
  const size_t before = free_bytes();
  for (int is_pool = 0; is_pool < 2; ++is_pool) {
    TRY(is_pool ? take_from_pool(&address, size, pool, NULL) : take(&address, size, NULL));
    const size_t with = free_bytes();
    REQUIRE(with < before);
    TRY(begin("cuStreamBeginCapture_v2_ptsz", NULL, CU_STREAM_CAPTURE_MODE_RELAXED));
    REQUIRE((is_pool ? take_from_pool(&other, size, pool, NULL) : take(&other, size, NULL)) ==
            CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE(give_back(address, NULL) != CUDA_SUCCESS && free_bytes() == with);
    TRY(cuStreamEndCapture(CU_STREAM_PER_THREAD, &graph));
    TRY(cuGraphDestroy(graph));
    TRY(give_back(address, NULL));
    TRY(cuCtxSynchronize());
    REQUIRE(free_bytes() == before);
  }
  return 0;
}

int main(int count, char** words) {
  CUcontext context = NULL;
  library = dlopen("libcuda.so.1", RTLD_NOW);
  REQUIRE(count == 3 && library != NULL);
  TRY(cuInit(0));
  TRY(cuDevicePrimaryCtxRetain(&context, 0));
  TRY(cuCtxSetCurrent(context));
  const size_t size = strtoull(words[2], NULL, 10);
  return strcmp(words[1], "capture") == 0 ? capture(size) : allocate_in_order(size);
}
