#include "store/ram_store.h"

#include <cstring>

#include "store/anonymous_memory.h"
#include "store/nontemporal_copy.h"

namespace ebbtide {
namespace {

class RamBackup : public Backup {
 public:
  explicit RamBackup(AnonymousMemory memory) : memory_(std::move(memory)) {}

  void write(size_t offset, const std::byte* bytes, size_t size_bytes) override {
    copy_nontemporal(memory_.bytes() + offset, bytes, size_bytes);
  }
  void read(size_t offset, std::byte* bytes, size_t size_bytes) const override {
    // It may stay in the cache: the copy engine reads it next.
    std::memcpy(bytes, memory_.bytes() + offset, size_bytes);
  }
  const std::byte* memory() const noexcept override { return memory_.bytes(); }
  void discard(size_t offset, size_t size_bytes) noexcept override { memory_.discard(offset, size_bytes); }
  std::byte* view() override { return memory_.bytes(); }
  void populate(size_t offset, size_t size_bytes) override { memory_.populate(offset, size_bytes); }

 private:
  const AnonymousMemory memory_;
};

}  // namespace

std::unique_ptr<Backup> RamStore::open(size_t size_bytes) {
  return std::make_unique<RamBackup>(AnonymousMemory::map(size_bytes));
}

}  // namespace ebbtide
