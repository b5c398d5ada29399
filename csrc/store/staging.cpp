#include "store/staging.h"

#include "base/log.h"
#include "vmm/limbo.h"

namespace ebbtide {

std::unique_ptr<Staging> Staging::allocate(size_t slot_bytes, int slot_count) {
  const size_t size_bytes = slot_bytes * static_cast<size_t>(slot_count);
  void* bytes = nullptr;
  check(driver().cuMemHostAlloc(&bytes, size_bytes, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc",
        "size=" + std::to_string(size_bytes));
  return std::unique_ptr<Staging>(new Staging(static_cast<std::byte*>(bytes), slot_bytes, slot_count));
}

Staging::~Staging() {
  if (is_poisoned()) return;
  const CUresult result = driver_if_loaded()->cuMemFreeHost(bytes_);
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_DEINITIALIZED) {
    log_line(LogLevel::kInfo, {"cuMemFreeHost failed with ", result_name(result), ": it will be tried again"});
    limbo::add_host_free(bytes_);
  }
}

}  // namespace ebbtide
