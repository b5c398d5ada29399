/* Memory that a client creates with cuMemCreate and maps itself, as newer frameworks do. */
#include <stdint.h>

#include "steps.h"

#define MOST_MAPPED 64

/* The steps that are still to be undone, by address. */
static struct mapped {
  CUdeviceptr address;
  size_t size;
  CUmemGenericAllocationHandle handle;
  int has_handle, is_mapped;
} blocks[MOST_MAPPED];

static struct mapped* find(CUdeviceptr address) {
  for (int i = 0; i < MOST_MAPPED; ++i) {
    if (blocks[i].address == address) return &blocks[i];
  }
  return NULL;
}

static CUresult fill_block(const struct api* api, struct mapped* block, size_t size) {
  CUmemAllocationProp properties;
  CUmemAccessDesc access;
  memset(&properties, 0, sizeof properties);
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.allocFlags.gpuDirectRDMACapable = 1;
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CUresult result = api->cuMemCreate(&block->handle, size, &properties, 0);
  if (result != CUDA_SUCCESS) return result;
  block->has_handle = 1;
  result = api->cuMemMap(block->address, size, 0, block->handle, 0);
  if (result != CUDA_SUCCESS) return result;
  block->is_mapped = 1;
  return api->cuMemSetAccess(block->address, size, &access, 1);
}

CUresult map_memory(const struct api* api, CUdeviceptr* address, size_t size) {
  struct mapped* block = find(0);
  if (block == NULL) return CUDA_ERROR_UNKNOWN;
  CUresult result = api->cuMemAddressReserve(&block->address, size, 0, 0, 0);
  if (result != CUDA_SUCCESS) {
    block->address = 0;
    return result;
  }
  block->size = size;
  *address = block->address;
  result = fill_block(api, block, size);
  /* A second attempt, since a test may make a call of the first one fail. */
  if (result != CUDA_SUCCESS && unmap_memory(api, *address) != CUDA_SUCCESS) unmap_memory(api, *address);
  return result;
}

/* Continues where it failed before. */
CUresult unmap_memory(const struct api* api, CUdeviceptr address) {
  struct mapped* block = find(address);
  CUresult result = CUDA_SUCCESS;
  if (block == NULL) return CUDA_ERROR_INVALID_VALUE;
  if (block->is_mapped && (result = api->cuMemUnmap(address, block->size)) != CUDA_SUCCESS) return result;
  block->is_mapped = 0;
  if (block->has_handle && (result = api->cuMemRelease(block->handle)) != CUDA_SUCCESS) return result;
  block->has_handle = 0;
  if ((result = api->cuMemAddressFree(address, block->size)) != CUDA_SUCCESS) return result;
  block->address = 0;
  return CUDA_SUCCESS;
}
