#include "store/pinned_store.h"

#include <cstring>
#include <string>

#include "base/bytes.h"
#include "base/error.h"
#include "store/memory_backup.h"

namespace ebbtide {
namespace {

class PinnedBackup : public MemoryBackup {
 public:
  using MemoryBackup::MemoryBackup;

  void write(size_t offset, const std::byte* bytes, size_t size_bytes) override {
    std::memcpy(memory_.bytes() + offset, bytes, size_bytes);
  }
  void discard(size_t /*offset*/, size_t /*size_bytes*/) noexcept override {}
  void seal() override;
};

void PinnedBackup::seal() {
  const size_t size_bytes = memory_.memory().size_bytes();
  const Shortage shortage = {size_bytes, 0, kUnlimited};
  if (!PinnedMemory::can_pin()) {
    throw StoreError("this driver can't pin memory that is there already: use ram backups", shortage, Cause::kPinning);
  }
  const CUresult result = memory_.try_pin();
  if (result != CUDA_SUCCESS) {
    throw StoreError("the system pins no " + format_bytes(size_bytes) +
                         " for a backup: cuMemHostRegister failed with " + result_name(result) +
                         ". Raise `ulimit -l`, pin less, or use ram backups",
                     shortage, Cause::kPinning);
  }
}

}  // namespace

std::unique_ptr<Backup> PinnedStore::open(size_t size_bytes) {
  return std::make_unique<PinnedBackup>(AnonymousMemory::map(size_bytes));
}

}  // namespace ebbtide
