#include "store/ram_store.h"

#include "base/log.h"
#include "store/memory_backup.h"
#include "store/nontemporal_copy.h"

namespace ebbtide {
namespace {

class RamBackup : public MemoryBackup {
 public:
  using MemoryBackup::MemoryBackup;

  void write(size_t offset, const std::byte* bytes, size_t size_bytes) override {
    copy_nontemporal(memory_.bytes() + offset, bytes, size_bytes);
  }
  void discard(size_t offset, size_t size_bytes) noexcept override {
    // The device would go on using the pages that were pinned, and the host would see others.
    if (!memory_.is_pinned()) memory_.memory().discard(offset, size_bytes);
  }
  bool try_pin() noexcept override;
};

bool RamBackup::try_pin() noexcept {
  if (memory_.is_pinned()) return true;
  if (!PinnedMemory::can_pin()) return false;
  const CUresult result = memory_.try_pin();
  if (result != CUDA_SUCCESS)
    log_line(LogLevel::kInfo, {"a backup stays unpinned: cuMemHostRegister failed with ", result_name(result)});
  return result == CUDA_SUCCESS;
}

}  // namespace

std::unique_ptr<Backup> RamStore::open(size_t size_bytes) {
  return std::make_unique<RamBackup>(AnonymousMemory::map(size_bytes));
}

}  // namespace ebbtide
