#include "store/pinned_memory.h"

#include "base/log.h"
#include "vmm/deferred_undos.h"

namespace ebbtide {

bool PinnedMemory::can_pin() {
  const Driver& table = driver();
  return table.cuMemHostRegister != nullptr && table.cuMemHostUnregister != nullptr;
}

CUresult PinnedMemory::try_pin() {
  const CUresult result = driver().cuMemHostRegister(memory_.bytes(), memory_.size_bytes(),
                                                     CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
  is_pinned_.store(result == CUDA_SUCCESS);
  return result;
}

PinnedMemory::~PinnedMemory() {
  if (!is_pinned_.load()) return;
  if (is_abandoned_.load()) {
    memory_.release();
    return;
  }
  std::byte* const bytes = memory_.bytes();
  const CUresult result = driver_if_loaded()->cuMemHostUnregister(bytes);
  if (deferred_undos::is_unregistered(result)) return;
  log_line(LogLevel::kInfo, {"cuMemHostUnregister failed with ", result_name(result), ": it will be tried again"});
  const AnonymousMemory::Range range = memory_.release();
  deferred_undos::add_host_unregister(bytes, range.mapping, range.mapping_bytes);
}

}  // namespace ebbtide
