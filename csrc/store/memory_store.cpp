#include "store/memory_store.h"

#include <cstring>
#include <string>

#include "base/bytes.h"
#include "base/error.h"
#include "base/log.h"
#include "store/host_memory.h"
#include "store/nontemporal_copy.h"

namespace ebbtide {
namespace {

class MemoryBackup final : public Backup {
 public:
  MemoryBackup(BackupKind kind, size_t size_bytes)
      : is_pinned_whole_(kind == BackupKind::kPinned), memory_(HostMemory::map(size_bytes)) {}

  void write(size_t offset, const std::byte* bytes, size_t size_bytes) override {
    if (is_pinned_whole_)
      std::memcpy(memory_->bytes() + offset, bytes, size_bytes);
    else
      copy_nontemporal(memory_->bytes() + offset, bytes, size_bytes);
  }
  void read(size_t offset, std::byte* bytes, size_t size_bytes) const override {
    // It may stay in the cache: the copy engine reads it next.
    std::memcpy(bytes, memory_->bytes() + offset, size_bytes);
  }
  const std::byte* memory() const noexcept override { return memory_->bytes(); }
  void discard(size_t offset, size_t size_bytes) noexcept override {
    // The device would go on using the pages that were pinned, and the host would see others.
    if (!memory_->is_pinned()) memory_->discard(offset, size_bytes);
  }
  std::byte* view() override { return memory_->bytes(); }
  std::byte* direct() noexcept override { return memory_->is_pinned() ? memory_->bytes() : nullptr; }
  void populate(size_t offset, size_t size_bytes) override { memory_->populate(offset, size_bytes); }
  void seal() override;
  bool try_pin() noexcept override;
  void abandon() noexcept override { memory_->abandon(); }
  bool is_abandoned() const noexcept override { return memory_->is_abandoned(); }

 private:
  const bool is_pinned_whole_;
  const std::unique_ptr<HostMemory> memory_;
};

void MemoryBackup::seal() {
  if (!is_pinned_whole_) return;
  const CUresult result = memory_->try_pin();
  if (result == CUDA_SUCCESS) return;
  throw StoreError("the system pins no " + format_bytes(memory_->size_bytes()) +
                       " for a backup: cuMemHostRegister failed with " + result_name(result) +
                       ". Raise `ulimit -l`, pin less, or use ram backups",
                   {memory_->size_bytes(), 0, kUnlimited}, Cause::kPinning);
}

bool MemoryBackup::try_pin() noexcept {
  if (memory_->is_pinned()) return true;
  const CUresult result = memory_->try_pin();
  if (result != CUDA_SUCCESS)
    log_line(LogLevel::kInfo, {"a backup stays unpinned: cuMemHostRegister failed with ", result_name(result)});
  return result == CUDA_SUCCESS;
}

}  // namespace

std::unique_ptr<Backup> open_memory_backup(BackupKind kind, size_t size_bytes) {
  return std::make_unique<MemoryBackup>(kind, size_bytes);
}

}  // namespace ebbtide
