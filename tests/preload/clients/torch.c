/* Plays the libraries on the stack of an allocation: it is compiled under the name of each of them. */
#include <cuda.h>

typedef CUresult (*allocator)(CUdeviceptr* address, size_t size);

CUresult take(CUdeviceptr* address, size_t size);
CUresult take_through(allocator plugged, CUdeviceptr* address, size_t size);

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
