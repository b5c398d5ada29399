#include "store/staging.h"

#include "base/log.h"
#include "store/populate.h"
#include "vmm/deferred_undos.h"

namespace ebbtide {

std::unique_ptr<Staging> Staging::allocate(size_t size_bytes) {
  void* bytes = nullptr;
  check(driver().cuMemHostAlloc(&bytes, size_bytes, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc",
        "size=" + std::to_string(size_bytes));
  return std::unique_ptr<Staging>(new Staging(static_cast<std::byte*>(bytes), size_bytes));
}

std::unique_ptr<Staging> Staging::pin(size_t size_bytes, int threads) {
  if (!PinnedMemory::can_pin()) return allocate(size_bytes);
  PinnedMemory memory(AnonymousMemory::map(size_bytes));
  populate(memory.memory(), threads);
  check(memory.try_pin(), "cuMemHostRegister", "size=" + std::to_string(size_bytes));
  std::unique_ptr<Staging> staging(new Staging(memory.bytes(), size_bytes));
  staging->pinned_.emplace(std::move(memory));
  return staging;
}

Staging::~Staging() {
  if (is_poisoned()) {
    if (pinned_) pinned_->abandon();
    return;
  }
  if (pinned_) return;
  const CUresult result = driver_if_loaded()->cuMemFreeHost(bytes_);
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_DEINITIALIZED) {
    log_line(LogLevel::kInfo, {"cuMemFreeHost failed with ", result_name(result), ": it will be tried again"});
    deferred_undos::add_host_free(bytes_);
  }
}

}  // namespace ebbtide
