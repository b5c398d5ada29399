#include "store/pinned_store.h"

#include <cstring>
#include <string>

#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"
#include "driver/driver.h"
#include "store/anonymous_memory.h"
#include "vmm/limbo.h"

namespace ebbtide {
namespace {

class PinnedBackup : public Backup {
 public:
  explicit PinnedBackup(AnonymousMemory memory) : memory_(std::move(memory)) {}
  PinnedBackup(const PinnedBackup&) = delete;
  PinnedBackup& operator=(const PinnedBackup&) = delete;
  ~PinnedBackup() override {
    if (is_pinned_) unpin();
  }

  void write(size_t offset, const std::byte* bytes, size_t size_bytes) override {
    std::memcpy(memory_.bytes() + offset, bytes, size_bytes);
  }
  void read(size_t offset, std::byte* bytes, size_t size_bytes) const override {
    std::memcpy(bytes, memory_.bytes() + offset, size_bytes);
  }
  void discard(size_t /*offset*/, size_t /*size_bytes*/) noexcept override {}
  const std::byte* view() override { return memory_.bytes(); }
  std::byte* writable_view() override { return memory_.bytes(); }
  std::byte* direct() noexcept override { return is_pinned_ ? memory_.bytes() : nullptr; }
  void populate(size_t offset, size_t size_bytes) override { memory_.populate(offset, size_bytes); }
  void seal() override;

 private:
  void unpin() noexcept;
  AnonymousMemory memory_;
  bool is_pinned_ = false;
};

void PinnedBackup::seal() {
  const Driver& table = driver();
  const Shortage shortage = {memory_.size_bytes(), 0, kUnlimited};
  if (table.cuMemHostRegister == nullptr || table.cuMemHostUnregister == nullptr) {
    throw StoreError("this driver can't pin memory that is there already: use backup=\"ram\"", shortage);
  }
  const CUresult result = table.cuMemHostRegister(memory_.bytes(), memory_.size_bytes(), CU_MEMHOSTREGISTER_PORTABLE);
  if (result != CUDA_SUCCESS) {
    throw StoreError("the system pins no " + format_bytes(memory_.size_bytes()) +
                         " for a backup: cuMemHostRegister failed with " + result_name(result) +
                         ". Raise `ulimit -l`, pin less, or use backup=\"ram\"",
                     shortage);
  }
  is_pinned_ = true;
}

// Memory that the device may still reach is never unmapped.
void PinnedBackup::unpin() noexcept {
  const CUresult result = driver_if_loaded()->cuMemHostUnregister(memory_.bytes());
  if (limbo::is_unregistered(result)) return;
  log_line(LogLevel::kInfo, {"cuMemHostUnregister failed with ", result_name(result), ": it will be tried again"});
  const AnonymousMemory::Range range = memory_.release();
  limbo::add_host_unregister(memory_.bytes(), range.mapping, range.mapping_bytes);
}

}  // namespace

std::unique_ptr<Backup> PinnedStore::open(size_t size_bytes) {
  return std::make_unique<PinnedBackup>(AnonymousMemory::map(size_bytes));
}

}  // namespace ebbtide
