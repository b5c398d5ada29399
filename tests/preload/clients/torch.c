/* Plays the libraries on the stack of an allocation: it is compiled under the name of each of them. */
#include <cuda.h>

typedef CUresult (*allocator)(CUdeviceptr* address, size_t size);

CUresult take(CUdeviceptr* address, size_t size);
CUresult take_through(allocator plugged, CUdeviceptr* address, size_t size);
CUresult create(CUmemGenericAllocationHandle* handle, size_t size);

/* Not by a tail call, which would take this library off the stack. */
CUresult take(CUdeviceptr* address, size_t size) {
  volatile CUresult result = cuMemAlloc(address, size);
  return result;
}

/* By an allocator that was plugged into this one. */
CUresult take_through(allocator plugged, CUdeviceptr* address, size_t size) {
  volatile CUresult result = plugged(address, size);
  return result;
}

/* A part of an expandable segment. */
CUresult create(CUmemGenericAllocationHandle* handle, size_t size) {
  CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  volatile CUresult result = cuMemCreate(handle, size, &properties, 0);
  return result;
}
