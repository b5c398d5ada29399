/* The building blocks of actions. */
#ifndef EBBTIDE_PRELOAD_CLIENT_STEPS_H
#define EBBTIDE_PRELOAD_CLIENT_STEPS_H

#include <stdio.h>
#include <string.h>

#include "api.h"

static inline int failed(const char* what, CUresult result) {
  fprintf(stderr, "client: %s gives %d\n", what, (int)result);
  return result == CUDA_ERROR_OUT_OF_MEMORY ? 2 : 1;
}
#define TRY(call)                                                           \
  do {                                                                      \
    const CUresult result_of_try = (call);                                  \
    if (result_of_try != CUDA_SUCCESS) return failed(#call, result_of_try); \
  } while (0)
#define REQUIRE(condition)                                                     \
  do {                                                                         \
    if (!(condition)) {                                                        \
      fprintf(stderr, "client: not so: %s (line %d)\n", #condition, __LINE__); \
      return 1;                                                                \
    }                                                                          \
  } while (0)

/* Of mapped.c. */
CUresult map_memory(const struct api* api, CUdeviceptr* address, size_t size);
CUresult unmap_memory(const struct api* api, CUdeviceptr address);

static inline CUresult allocate(const struct api* api, const char* call, CUdeviceptr* address, size_t size) {
  size_t pitch = 0;
  CUmemoryPool pool = NULL;
  if (strcmp(call, "pitch") == 0) return api->cuMemAllocPitch(address, &pitch, 4096, size / 4096, 4);
  if (strcmp(call, "async") == 0) return api->cuMemAllocAsync(address, size, NULL);
  if (strcmp(call, "managed") == 0) return api->cuMemAllocManaged(address, size, CU_MEM_ATTACH_GLOBAL);
  if (strcmp(call, "mapped") == 0) return map_memory(api, address, size);
  if (strcmp(call, "pool") == 0) {
    const CUresult result = api->cuDeviceGetDefaultMemPool(&pool, 0);
    return result != CUDA_SUCCESS ? result : api->cuMemAllocFromPoolAsync(address, size, pool, NULL);
  }
  return api->cuMemAlloc(address, size);
}

static inline CUresult give_back(const struct api* api, const char* call, CUdeviceptr address) {
  if (strcmp(call, "mapped") == 0) return unmap_memory(api, address);
  const int is_in_stream = strcmp(call, "async") == 0 || strcmp(call, "pool") == 0;
  return is_in_stream ? api->cuMemFreeAsync(address, NULL) : api->cuMemFree(address);
}

static inline CUresult release(const struct api* api, const char* call, CUdeviceptr address) {
  const CUresult result = give_back(api, call, address);
  return result != CUDA_SUCCESS ? result : api->cuCtxSynchronize();
}

/* Of captures.c. */
int begin_captures(const struct api* api, size_t size);
int end_one_of_two(const struct api* api, size_t size);

/* Of refusals.c. */
int ask_wrongly(const struct api* api);
int take_pitched(const struct api* api, size_t width, size_t height);

/* Of faults.c, on the simulator only. */
int fail_to_free(const struct api* api, const char* call, size_t size);
int fail_each_call(const struct api* api, const char* call, size_t size);
int need_what_is_put_off(const struct api* api, size_t size);
int lose_managed(const struct api* api, const char* state, size_t size);

#endif
