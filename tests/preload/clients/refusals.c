/* Requests that the driver refuses, or answers with another size than requested. */
#include <stdint.h>

#include "steps.h"

static void wrong_handles(const struct api* api) {
  CUmemGenericAllocationHandle handle = 0;
  CUmemAllocationProp properties;
  memset(&properties, 0, sizeof properties);
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  for (int i = 0; i < 3; ++i) {
    properties.location.id = (int[]){-1, 100, 7777}[i];
    printf("%d ", (int)api->cuMemCreate(&handle, (size_t)2 << 20, &properties, 0));
  }
  properties.location.id = 0;
  printf("%d ", (int)api->cuMemCreate(NULL, (size_t)2 << 20, &properties, 0));
  printf("%d ", (int)api->cuMemCreate(&handle, 0, &properties, 0));
  printf("%d ", (int)api->cuMemCreate(&handle, (size_t)2 << 20, NULL, 0));
  printf("%d ", (int)api->cuMemRelease(12345));
}

static void wrong_pitches(const struct api* api) {
  CUdeviceptr address = 0;
  size_t pitch = 0;
  printf("%d ", (int)api->cuMemAllocPitch(&address, &pitch, 4096, 4, 3));
  printf("%d ", (int)api->cuMemAllocPitch(&address, &pitch, 0, 4, 4));
  printf("%d ", (int)api->cuMemAllocPitch(&address, &pitch, 4096, 0, 4));
  printf("%d ", (int)api->cuMemAllocPitch(NULL, &pitch, 4096, 4, 4));
  printf("%d ", (int)api->cuMemAllocPitch(&address, NULL, 4096, 4, 4));
  printf("%d ", (int)api->cuMemAllocPitch(&address, &pitch, (size_t)1 << 40, (size_t)1 << 40, 4));
}

/* wrong: a request that the driver refuses gets the driver's own error. */
int ask_wrongly(const struct api* api) {
  CUdeviceptr address = 0;
  size_t free_bytes = 0, total = 0;
  TRY(api->cuMemFree(0));
  TRY(api->cuMemAllocManaged(&address, 4096, CU_MEM_ATTACH_GLOBAL));
  printf("%d ", (int)api->cuMemFreeAsync(address, NULL));
  TRY(api->cuMemFree(address));
  wrong_handles(api);
  wrong_pitches(api);
  printf("%d %d ", (int)api->cuMemAllocAsync(NULL, 4096, NULL), (int)api->cuMemAllocAsync(&address, 0, NULL));
  printf("%d %d ", (int)api->cuMemAllocManaged(NULL, 4096, CU_MEM_ATTACH_GLOBAL),
         (int)api->cuMemAllocManaged(&address, 0, CU_MEM_ATTACH_GLOBAL));
  printf("%d %d %d ", (int)api->cuMemGetInfo(NULL, &total), (int)api->cuMemGetInfo(&free_bytes, NULL),
         (int)api->cuDeviceTotalMem(NULL, 0));
  printf("%d %d %d %d\n", (int)api->cuMemAlloc(NULL, 4096), (int)api->cuMemAlloc(&address, 0),
         (int)api->cuMemFree(0xDEAD000), (int)api->cuMemAlloc(&address, (size_t)1 << 60));
  return 0;
}

/* pitch WIDTH HEIGHT: writes and reads rows whose width is no multiple of a pitch. Prints the pitch, and how much the
 * free memory has shrunk. */
int take_pitched(const struct api* api, size_t width, size_t height) {
  CUdeviceptr address = 0;
  size_t pitch = 0, before = 0, with = 0, after = 0, total = 0, extent = 0;
  TRY(api->cuMemGetInfo(&before, &total));
  TRY(api->cuMemAllocPitch(&address, &pitch, width, height, 4));
  TRY(api->cuMemGetInfo(&with, &total));
  REQUIRE(pitch >= width);
  for (size_t row = 0; row < height; row += height - 1) {
    uint32_t value = 0x1234567 + (uint32_t)row, found = 0;
    const CUdeviceptr last = address + row * pitch + width / 4 * 4 - sizeof value;
    TRY(api->cuMemcpyHtoD(last, &value, sizeof value));
    TRY(api->cuMemcpyDtoH(&found, last, sizeof found));
    REQUIRE(found == value);
  }
  TRY(api->cuMemGetAddressRange(NULL, &extent, address));
  REQUIRE(extent >= pitch * (height - 1) + width && extent <= pitch * height);
  TRY(api->cuMemFree(address));
  TRY(api->cuMemGetInfo(&after, &total));
  REQUIRE(after == before);
  printf("pitch %zu, took %zu\n", pitch, before - with);
  return 0;
}
