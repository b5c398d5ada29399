#include "preload/own_context.h"

#include "driver/context.h"

namespace ebbtide::preload {

CUcontext own_context(int device) {
  CUcontext current = nullptr;
  if (driver().cuCtxGetCurrent(&current) != CUDA_SUCCESS) return nullptr;
  return current != primary_context(device) ? current : nullptr;
}

}  // namespace ebbtide::preload
