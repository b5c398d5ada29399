/* Actions on a simulator that fails on demand. */
#include <dlfcn.h>
#include <stdint.h>

#include "control.h"
#include "steps.h"

static void (*fail)(const char*, uint64_t, int, uint64_t);
static void (*clear)(void);
static uint64_t (*calls)(const char*);
static void (*live)(struct ebbtide_sim_counts*);

static int find_controls(void) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  *(void**)&fail = dlsym(library, "ebbtide_sim_fail");
  *(void**)&clear = dlsym(library, "ebbtide_sim_clear_failures");
  *(void**)&calls = dlsym(library, "ebbtide_sim_calls");
  *(void**)&live = dlsym(library, "ebbtide_sim_live");
  return fail != NULL && clear != NULL && calls != NULL && live != NULL;
}

/* faults CALL SIZE: fails each driver call of an allocation and a free in turn, once. Prints the number of calls. */
int fail_each_call(const struct api* api, const char* call, size_t size) {
  REQUIRE(find_controls());
  CUdeviceptr address = 0;
  ebbtide_sim_counts before, after;
  size_t free_before = 0, free_after = 0, total = 0;
  /* Makes everything that is made only once. */
  if (allocate(api, call, &address, size) == CUDA_SUCCESS) TRY(release(api, call, address));
  live(&before);
  TRY(api->cuMemGetInfo(&free_before, &total));
  int k = 1;
  for (int has_failed = 1; has_failed; ++k) {
    const uint64_t first = calls(NULL);
    fail(NULL, (uint64_t)k, CUDA_ERROR_OUT_OF_MEMORY, 1);
    const CUresult taken = allocate(api, call, &address, size);
    const CUresult freed = taken == CUDA_SUCCESS ? give_back(api, call, address) : CUDA_SUCCESS;
    has_failed = calls(NULL) - first >= (uint64_t)k;
    clear();
    if (freed != CUDA_SUCCESS) TRY(give_back(api, call, address));
    /* An undo that failed is repeated at the next allocation. */
    if (allocate(api, call, &address, size) == CUDA_SUCCESS) TRY(release(api, call, address));
    TRY(api->cuCtxSynchronize());
    live(&after);
    REQUIRE(after.device_bytes == before.device_bytes && after.handles == before.handles);
    REQUIRE(after.mappings == before.mappings && after.reservations == before.reservations);
    TRY(api->cuMemGetInfo(&free_after, &total));
    REQUIRE(free_after == free_before);
    REQUIRE(k < 2000);
  }
  printf("%d calls\n", k - 2);
  return 0;
}

/* free-fails CALL SIZE: memory that the driver does not free still counts as taken until it is freed. */
int fail_to_free(const struct api* api, const char* call, size_t size) {
  CUdeviceptr address = 0;
  size_t before = 0, with = 0, refused = 0, after = 0, total = 0;
  REQUIRE(find_controls());
  TRY(api->cuMemGetInfo(&before, &total));
  TRY(allocate(api, call, &address, size));
  TRY(api->cuMemGetInfo(&with, &total));
  const char* const function = strcmp(call, "mapped") == 0                               ? "cuMemRelease"
                               : strcmp(call, "async") == 0 || strcmp(call, "pool") == 0 ? "cuMemFreeAsync"
                                                                                         : "cuMemFree";
  fail(function, 1, CUDA_ERROR_UNKNOWN, 1);
  REQUIRE(give_back(api, call, address) == CUDA_ERROR_UNKNOWN);
  clear();
  TRY(api->cuMemGetInfo(&refused, &total));
  REQUIRE(refused == with && with < before);
  TRY(release(api, call, address));
  TRY(api->cuMemGetInfo(&after, &total));
  REQUIRE(after == before);
  return 0;
}

/* put-off SIZE: a free that failed twice to wait for the device is tried again when the next allocation needs its
 * memory. */
int need_what_is_put_off(const struct api* api, size_t size) {
  CUdeviceptr address = 0;
  REQUIRE(find_controls());
  TRY(api->cuMemAlloc(&address, size));
  fail("cuCtxSynchronize", 1, CUDA_ERROR_UNKNOWN, 2);
  TRY(api->cuMemFree(address));
  TRY(api->cuMemAlloc(&address, size));
  clear();
  TRY(api->cuMemFree(address));
  return 0;
}

/* Allocates memory that becomes managed, and loses the whole context; is_freed: after a free that was deferred. Then
 * allocates the same size again, from the device or again managed. */
static int take_twice(const struct api* api, size_t size, int is_freed, int is_managed, CUdeviceptr* again) {
  CUresult (*let_go)(CUdevice) = NULL;
  CUdeviceptr lost = 0;
  CUcontext context = NULL;
  *(void**)&let_go = dlsym(dlopen("libcuda.so.1", RTLD_NOW), SYMBOL(cuDevicePrimaryCtxRelease));
  fail("cuMemAlloc", 1, CUDA_ERROR_OUT_OF_MEMORY, 1);
  TRY(api->cuMemAlloc(&lost, size));
  fail("cuCtxSynchronize", 1, CUDA_ERROR_UNKNOWN, 1);
  if (is_freed) TRY(api->cuMemFree(lost));
  clear();
  while (let_go(0) == CUDA_SUCCESS) continue;
  /* One for the client, and one for the library. */
  for (int i = 0; i < 2; ++i) TRY(api->cuDevicePrimaryCtxRetain(&context, 0));
  TRY(api->cuCtxSetCurrent(context));
  /* Keeps the deferred free from being tried before. */
  if (is_managed) fail("cuCtxSynchronize", 1, CUDA_ERROR_UNKNOWN, 0);
  if (is_managed) fail("cuMemAlloc", 1, CUDA_ERROR_OUT_OF_MEMORY, 1);
  TRY(api->cuMemAlloc(again, size));
  clear();
  REQUIRE(*again == lost);
  return 0;
}

/* lost living|freed|living-managed|freed-managed SIZE: managed memory is lost with its context, and its address is used
 * again. ebbtide does not confuse the two. */
int lose_managed(const struct api* api, const char* state, size_t size) {
  const int is_managed = strstr(state, "managed") != NULL;
  CUdeviceptr again = 0, other = 0, start = 0;
  size_t before = 0, after = 0, total = 0, extent = 0;
  REQUIRE(find_controls());
  TRY(api->cuMemGetInfo(&before, &total));
  const int status = take_twice(api, size, strncmp(state, "freed", 5) == 0, is_managed, &again);
  if (status != 0) return status;
  fail("cuMemAlloc", 1, CUDA_ERROR_OUT_OF_MEMORY, 1);
  TRY(api->cuMemAlloc(&other, size)); /* managed: tries the deferred free again */
  clear();
  TRY(api->cuMemFree(other));
  TRY(api->cuMemGetAddressRange(&start, &extent, again));
  REQUIRE(start == again && other != again);
  TRY(api->cuMemFreeAsync(again, NULL));
  TRY(api->cuCtxSynchronize());
  TRY(api->cuMemGetInfo(&after, &total));
  REQUIRE(after == before);
  return 0;
}
