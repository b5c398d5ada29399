/* The actions of a client, with the driver that it has found. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "steps.h"

#define MOST_BLOCKS 64

static int start(const struct api* api) {
  CUcontext context = NULL;
  TRY(api->cuInit(0));
  TRY(api->cuDevicePrimaryCtxRetain(&context, 0));
  TRY(api->cuCtxSetCurrent(context));
  return 0;
}

static void fill(uint32_t* words, size_t count, uint32_t seed) {
  for (size_t i = 0; i < count; ++i) words[i] = (uint32_t)i * 2654435761u + seed;
}

/* fill CALL COUNT SIZE: allocates COUNT blocks, writes and reads all of them, and frees them. Prints the free memory
 * before and after. */
static int fill_blocks(const struct api* api, const char* call, int count, size_t size) {
  CUdeviceptr blocks[MOST_BLOCKS] = {0};
  size_t free_before = 0, free_after = 0, total = 0;
  uint32_t* wanted = malloc(size);
  uint32_t* found = malloc(size);
  REQUIRE(count <= MOST_BLOCKS && wanted != NULL && found != NULL);
  TRY(api->cuMemGetInfo(&free_before, &total));
  for (int i = 0; i < count; ++i) TRY(allocate(api, call, &blocks[i], size));
  for (int i = 0; i < count; ++i) {
    fill(wanted, size / 4, (uint32_t)i);
    TRY(api->cuMemcpyHtoD(blocks[i], wanted, size));
  }
  for (int i = 0; i < count; ++i) {
    fill(wanted, size / 4, (uint32_t)i);
    memset(found, 0, size);
    TRY(api->cuMemcpyDtoH(found, blocks[i], size));
    REQUIRE(memcmp(found, wanted, size) == 0);
  }
  /* Frees the first half in order, then the rest from the end, so that no order is special. */
  for (int i = 0; i < count / 2; ++i) TRY(release(api, call, blocks[i]));
  for (int i = count - 1; i >= count / 2; --i) TRY(release(api, call, blocks[i]));
  TRY(api->cuMemGetInfo(&free_after, &total));
  printf("free %zu before, %zu after\n", free_before, free_after);
  free(wanted);
  free(found);
  return 0;
}

/* info: prints the free bytes, the total bytes, and the device's total. */
static int tell_info(const struct api* api) {
  size_t free_bytes = 0, total = 0, of_device = 0;
  TRY(api->cuMemGetInfo(&free_bytes, &total));
  TRY(api->cuDeviceTotalMem(&of_device, 0));
  /* Each output is optional. */
  size_t alone = 0;
  TRY(api->cuMemGetInfo(&alone, NULL));
  REQUIRE(alone == free_bytes);
  TRY(api->cuMemGetInfo(NULL, &alone));
  REQUIRE(alone == total);
  printf("%zu %zu %zu\n", free_bytes, total, of_device);
  return 0;
}

/* take CALL SIZE: prints the free bytes before, during and after one allocation. */
static int take(const struct api* api, const char* call, size_t size) {
  size_t before = 0, with = 0, after = 0, total = 0;
  CUdeviceptr address = 0;
  TRY(api->cuMemGetInfo(&before, &total));
  TRY(allocate(api, call, &address, size));
  TRY(api->cuMemGetInfo(&with, &total));
  TRY(release(api, call, address));
  TRY(api->cuMemGetInfo(&after, &total));
  printf("%zu %zu %zu\n", before, with, after);
  return 0;
}

/* mixed CALL COUNT LARGE SMALL: allocates COUNT blocks of LARGE bytes and one of LARGE/2, then six of SMALL, and prints
 * how much each reduces the free memory. Then allocates, writes and reads one more of LARGE. */
static int take_mixed(const struct api* api, const char* call, int count, size_t large, size_t small) {
  CUdeviceptr blocks[MOST_BLOCKS] = {0};
  size_t before = 0, after = 0, total = 0;
  uint32_t value = 0x1234567, found = 0;
  REQUIRE(count + 8 <= MOST_BLOCKS);
  for (int i = 0; i < count + 8; ++i) {
    const size_t size = i < count || i == count + 7 ? large : i == count ? large / 2 : small;
    TRY(api->cuMemGetInfo(&before, &total));
    TRY(allocate(api, call, &blocks[i], size));
    TRY(api->cuMemGetInfo(&after, &total));
    if (i > count) printf("%zu ", (before - after) >> 20);
    TRY(api->cuMemcpyHtoD(blocks[i] + size - sizeof value, &value, sizeof value));
    TRY(api->cuMemcpyDtoH(&found, blocks[i] + size - sizeof value, sizeof value));
    REQUIRE(found == value);
  }
  for (int i = 0; i < count + 8; ++i) TRY(release(api, call, blocks[i]));
  TRY(api->cuMemGetInfo(&after, &total));
  printf("free %zu\n", after >> 20);
  return 0;
}

/* probe SIZE: requests a hundred times more than there is. */
static int probe(const struct api* api, size_t size) {
  CUdeviceptr address = 0;
  for (int i = 0; i < 100; ++i) REQUIRE(api->cuMemAlloc(&address, size) == CUDA_ERROR_OUT_OF_MEMORY);
  return 0;
}

/* handles SIZE: the same with cuMemCreate, whose memory has no address. */
static int take_handle(const struct api* api, size_t size) {
  size_t before = 0, with = 0, after = 0, total = 0;
  CUmemGenericAllocationHandle handle = 0;
  CUmemAllocationProp properties;
  memset(&properties, 0, sizeof properties);
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  TRY(api->cuMemGetInfo(&before, &total));
  TRY(api->cuMemCreate(&handle, size, &properties, 0));
  TRY(api->cuMemGetInfo(&with, &total));
  TRY(api->cuMemRelease(handle));
  TRY(api->cuMemGetInfo(&after, &total));
  printf("%zu %zu %zu\n", before, with, after);
  return 0;
}

/* retained SIZE: retains the handle behind mapped memory twice, and gives it back as often: prints the free bytes
 * before the memory is made, with the handle retained, when one is given back, when that fails, when the other is, and
 * after all. */
static int retain_handle(const struct api* api, size_t size) {
  size_t seen[6] = {0}, total = 0;
  CUdeviceptr address = 0;
  CUmemGenericAllocationHandle handle = 0, again = 0;
  void (*fail)(const char*, uint64_t, uint32_t, uint64_t) = NULL;
  *(void**)&fail = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "ebbtide_sim_fail");
  TRY(api->cuMemGetInfo(&seen[0], &total));
  TRY(allocate(api, "mapped", &address, size));
  TRY(api->cuMemRetainAllocationHandle(&handle, (void*)address));
  TRY(api->cuMemRetainAllocationHandle(&again, (void*)address));
  REQUIRE(handle == again);
  TRY(api->cuMemGetInfo(&seen[1], &total));
  TRY(api->cuMemRelease(handle));
  TRY(api->cuMemGetInfo(&seen[2], &total));
  if (fail != NULL) {
    fail("cuMemRelease", 1, CUDA_ERROR_UNKNOWN, 1);
    REQUIRE(api->cuMemRelease(handle) == CUDA_ERROR_UNKNOWN);
  }
  TRY(api->cuMemGetInfo(&seen[3], &total));
  TRY(api->cuMemRelease(handle));
  TRY(api->cuMemGetInfo(&seen[4], &total));
  TRY(release(api, "mapped", address));
  TRY(api->cuMemGetInfo(&seen[5], &total));
  for (int i = 0; i < 6; ++i) printf("%zu ", seen[i]);
  return 0;
}

static int check_pointer(const struct api* api, CUdeviceptr start, size_t size, CUdeviceptr address) {
  CUdeviceptr base = 0, range_start = 0, pointer = 0;
  size_t range_size = 0, extent = 0;
  unsigned int type = 0, is_managed = 9;
  int device = -1;
  void* on_host = &on_host;
  CUpointer_attribute asked[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                 CU_POINTER_ATTRIBUTE_HOST_POINTER, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  TRY(api->cuMemGetAddressRange(&base, &extent, address));
  REQUIRE(base == start && extent == size);
  TRY(api->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address));
  TRY(api->cuPointerGetAttribute(&range_start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address));
  TRY(api->cuPointerGetAttribute(&range_size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, address));
  TRY(api->cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address));
  TRY(api->cuPointerGetAttribute(&pointer, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, address));
  TRY(api->cuPointerGetAttribute(&is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, address));
  REQUIRE(type == CU_MEMORYTYPE_DEVICE && range_start == start && range_size == size);
  REQUIRE(device == 0 && pointer == address && is_managed == 0);
  CUcontext context = NULL, primary = NULL;
  TRY(api->cuDevicePrimaryCtxRetain(&primary, 0));
  TRY(api->cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, address));
  REQUIRE(context == primary);
  TRY(api->cuMemGetAddressRange(NULL, &extent, address));
  TRY(api->cuMemGetAddressRange(&base, NULL, address));
  REQUIRE(api->cuPointerGetAttribute(NULL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) != CUDA_SUCCESS);
  REQUIRE(api->cuPointerGetAttribute(&on_host, CU_POINTER_ATTRIBUTE_HOST_POINTER, address) != CUDA_SUCCESS);
  type = 0, range_size = 0, device = -1;
  void* into[] = {&type, &range_size, &on_host, &device};
  TRY(api->cuPointerGetAttributes(4, asked, into, address));
  REQUIRE(type == CU_MEMORYTYPE_DEVICE && range_size == size && on_host == NULL && device == 0);
  return 0;
}

/* pointers SIZE: the driver reports one allocation as one allocation on the device. Prints the result of an IPC
 * handle. */
static int look_at_pointers(const struct api* api, size_t size) {
  CUdeviceptr address = 0;
  CUipcMemHandle handle;
  TRY(api->cuMemAlloc(&address, size));
  const size_t offsets[] = {0, size / 2, size - 1};
  for (int i = 0; i < 3; ++i) {
    const int status = check_pointer(api, address, size, address + offsets[i]);
    if (status != 0) return status;
  }
  printf("ipc %d\n", (int)api->cuIpcGetMemHandle(&handle, address));
  TRY(api->cuMemFree(address));
  return 0;
}

/* free-waits SIZE: work that was queued before a free has run when the free returns. */
static int free_waits(const struct api* api, size_t size) {
  CUdeviceptr freed = 0, kept = 0;
  CUstream stream = NULL;
  uint32_t value = 0x1234567, found = 0;
  TRY(api->cuMemAlloc(&kept, 4096));
  TRY(api->cuMemAlloc(&freed, size));
  TRY(api->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  TRY(api->cuMemcpyHtoDAsync(freed, &value, sizeof value, stream));
  TRY(api->cuMemcpyHtoDAsync(kept, &value, sizeof value, stream));
  TRY(api->cuMemFree(freed));
  /* The default stream does not wait for this one. */
  TRY(api->cuMemcpyDtoH(&found, kept, sizeof found));
  REQUIRE(found == value);
  TRY(api->cuMemFree(kept));
  REQUIRE(api->cuMemFree(freed) == CUDA_ERROR_INVALID_VALUE);
  return 0;
}

/* free-in-order SIZE: work that was queued before a stream-ordered free can still access the memory. */
static int free_in_order(const struct api* api, size_t size) {
  CUdeviceptr freed = 0, kept = 0;
  CUstream stream = NULL;
  uint32_t value = 0x1234567, found = 0;
  TRY(api->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  TRY(api->cuMemAlloc(&kept, 4096));
  TRY(api->cuMemAllocAsync(&freed, size, stream));
  TRY(api->cuMemcpyHtoDAsync(freed, &value, sizeof value, stream));
  TRY(api->cuMemcpyHtoDAsync(freed + size - sizeof value, &value, sizeof value, stream));
  TRY(api->cuMemcpyHtoDAsync(kept, &value, sizeof value, stream));
  TRY(api->cuMemFreeAsync(freed, stream));
  TRY(api->cuStreamSynchronize(stream));
  TRY(api->cuMemcpyDtoH(&found, kept, sizeof found));
  REQUIRE(found == value);
  TRY(api->cuMemFree(kept));
  return 0;
}

/* free-beside once|twice SIZE: a stream-ordered free on one stream while another captures in the strictest mode. The
 * capture continues, and the memory is freed after it. */
static int free_beside_capture(const struct api* api, int is_twice, size_t size) {
  CUdeviceptr address = 0, start = 0;
  CUstream stream = NULL, capturing = NULL;
  CUgraph graph = NULL;
  size_t before = 0, with = 0, after = 0, total = 0, extent = 0;
  TRY(api->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  TRY(api->cuStreamCreate(&capturing, CU_STREAM_NON_BLOCKING));
  TRY(api->cuMemGetInfo(&before, &total));
  TRY(api->cuMemAllocAsync(&address, size, stream));
  TRY(api->cuMemGetInfo(&with, &total));
  TRY(api->cuStreamBeginCapture(capturing, CU_STREAM_CAPTURE_MODE_GLOBAL));
  TRY(api->cuMemFreeAsync(address, stream));
  REQUIRE(!is_twice || api->cuMemFreeAsync(address, stream) == CUDA_ERROR_INVALID_VALUE);
  TRY(api->cuMemGetAddressRange(&start, &extent, address));
  TRY(api->cuStreamEndCapture(capturing, &graph));
  TRY(api->cuGraphDestroy(graph));
  REQUIRE(api->cuMemGetAddressRange(&start, &extent, address) != CUDA_SUCCESS);
  TRY(api->cuMemGetInfo(&after, &total));
  REQUIRE(with < before && after == before);
  return 0;
}

/* capture SIZE: during a capture, stream-ordered memory is left to the driver. Other memory may be allocated, and is
 * freed late. The capture continues. */
static int capture(const struct api* api, size_t size) {
  CUstream stream = NULL;
  CUgraph graph = NULL;
  CUdeviceptr address = 0, placed = 0, other = 0;
  TRY(api->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  TRY(api->cuMemAllocAsync(&placed, size, stream));
  TRY(api->cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  printf("allocate %d\n", (int)api->cuMemAllocAsync(&address, size, stream));
  REQUIRE(api->cuMemFreeAsync(placed, stream) != CUDA_SUCCESS);
  TRY(api->cuMemAlloc(&other, size));
  TRY(api->cuMemFree(other));
  TRY(api->cuStreamEndCapture(stream, &graph));
  TRY(api->cuGraphDestroy(graph));
  TRY(api->cuMemFreeAsync(placed, stream));
  TRY(api->cuStreamSynchronize(stream));
  return 0;
}

/* destroyed SIZE: a stream is destroyed while it captures. Prints the free bytes before and after an allocation and its
 * free. */
static int destroy_capturing(const struct api* api, size_t size) {
  CUdeviceptr address = 0;
  CUstream stream = NULL;
  CUgraph graph = NULL;
  size_t before = 0, after = 0, total = 0;
  TRY(api->cuMemGetInfo(&before, &total));
  TRY(api->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  REQUIRE(api->cuStreamEndCapture(stream, &graph) != CUDA_SUCCESS);
  TRY(api->cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  TRY(api->cuStreamDestroy(stream));
  REQUIRE(api->cuStreamDestroy(stream) != CUDA_SUCCESS);
  TRY(api->cuMemAlloc(&address, size));
  TRY(api->cuMemFree(address));
  TRY(api->cuMemGetInfo(&after, &total));
  printf("%zu %zu\n", before, after);
  return 0;
}

/* cached SIZE: acts as torch's allocator does. It keeps two blocks; if it is refused, it frees them and asks again. */
static int keep_cache(const struct api* api, size_t size) {
  CUdeviceptr cached[2] = {0}, address = 0;
  const int count = size > ((size_t)12 << 20) ? 0 : 2;
  for (int i = 0; i < count; ++i) TRY(api->cuMemAlloc(&cached[i], size));
  CUresult result = api->cuMemAlloc(&address, size);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    printf("refused, then ");
    for (int i = 0; i < count; ++i) TRY(api->cuMemFree(cached[i]));
    result = api->cuMemAlloc(&address, size);
  }
  TRY(result);
  TRY(api->cuMemFree(address));
  printf("taken\n");
  return 0;
}

/* peers SIZE REFUSED: memory of device 0 spills. Then device 1 enables access to it and copies there, while REFUSED
 * calls of cuMemSetAccess fail. Prints the results of the two calls. */
static int copy_from_peer(const struct api* api, size_t size, int refused) {
  void (*fail)(const char*, uint64_t, int, uint64_t) = NULL;
  CUdeviceptr here = 0, there = 0;
  CUcontext first = NULL, second = NULL;
  uint32_t* wanted = malloc(size);
  uint32_t* found = malloc(size);
  int can = 0;
  REQUIRE(wanted != NULL && found != NULL);
  TRY(api->cuDevicePrimaryCtxRetain(&first, 0));
  TRY(api->cuMemAlloc(&here, size));
  TRY(api->cuDevicePrimaryCtxRetain(&second, 1));
  TRY(api->cuCtxSetCurrent(second));
  TRY(api->cuDeviceCanAccessPeer(&can, 1, 0));
  REQUIRE(can == 1);
  *(void**)&fail = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "ebbtide_sim_fail");
  if (refused > 0) fail("cuMemSetAccess", 1, CUDA_ERROR_UNKNOWN, (uint64_t)refused);
  const CUresult enabled = api->cuCtxEnablePeerAccess(first, 0);
  const CUresult again = api->cuCtxEnablePeerAccess(first, 0);
  TRY(api->cuMemAlloc(&there, size));
  fill(wanted, size / 4, 9);
  TRY(api->cuMemcpyHtoD(there, wanted, size));
  const CUresult copied = api->cuMemcpyDtoDAsync(here, there, size, NULL);
  TRY(api->cuCtxSynchronize());
  TRY(api->cuCtxSetCurrent(first));
  TRY(api->cuMemcpyDtoH(found, here, size));
  printf("enabled %d, then %d, copied %d: %s\n", (int)enabled, (int)again, (int)copied,
         memcmp(found, wanted, size) == 0 ? "right" : "not there");
  return 0;
}

int run_action(const struct api* api, int count, char** words) {
  const char* action = words[0];
  const size_t last = strtoull(words[count - 1], NULL, 10);
  const int status = start(api);
  if (status != 0) return status;
  if (strcmp(action, "info") == 0) return tell_info(api);
  if (strcmp(action, "wrong") == 0) return ask_wrongly(api);
  if (strcmp(action, "fill") == 0 && count == 4) return fill_blocks(api, words[1], atoi(words[2]), last);
  if (strcmp(action, "take") == 0 && count == 3) return take(api, words[1], last);
  if (strcmp(action, "mixed") == 0 && count == 5)
    return take_mixed(api, words[1], atoi(words[2]), strtoull(words[3], NULL, 10), last);
  if (strcmp(action, "probe") == 0 && count == 2) return probe(api, last);
  if (strcmp(action, "handles") == 0 && count == 2) return take_handle(api, last);
  if (strcmp(action, "retained") == 0 && count == 2) return retain_handle(api, last);
  if (strcmp(action, "pointers") == 0 && count == 2) return look_at_pointers(api, last);
  if (strcmp(action, "free-waits") == 0 && count == 2) return free_waits(api, last);
  if (strcmp(action, "free-in-order") == 0 && count == 2) return free_in_order(api, last);
  if (strcmp(action, "free-beside") == 0 && count == 3)
    return free_beside_capture(api, strcmp(words[1], "twice") == 0, last);
  if (strcmp(action, "capture") == 0 && count == 2) return capture(api, last);
  if (strcmp(action, "destroyed") == 0 && count == 2) return destroy_capturing(api, last);
  if (strcmp(action, "begins") == 0 && count == 2) return begin_captures(api, last);
  if (strcmp(action, "two-captures") == 0 && count == 2) return end_one_of_two(api, last);
  if (strcmp(action, "pitch") == 0 && count == 3) return take_pitched(api, strtoull(words[1], NULL, 10), last);
  if (strcmp(action, "free-fails") == 0 && count == 3) return fail_to_free(api, words[1], last);
  if (strcmp(action, "cached") == 0 && count == 2) return keep_cache(api, last);
  if (strcmp(action, "faults") == 0 && count == 3) return fail_each_call(api, words[1], last);
  if (strcmp(action, "put-off") == 0 && count == 2) return need_what_is_put_off(api, last);
  if (strcmp(action, "peers") == 0 && count == 3) return copy_from_peer(api, strtoull(words[1], NULL, 10), (int)last);
  if (strcmp(action, "lost") == 0 && count == 3) return lose_managed(api, words[1], last);
  fprintf(stderr, "client: unknown action %s\n", action);
  return 1;
}
