#pragma once

#include <cstddef>
#include <utility>

#include "store/pinned_memory.h"
#include "store/store.h"

namespace ebbtide {

// What backups in host memory have in common. The copy engine accesses them directly once they are pinned.
class MemoryBackup : public Backup {
 public:
  explicit MemoryBackup(AnonymousMemory memory) : memory_(std::move(memory)) {}

  void read(size_t offset, std::byte* bytes, size_t size_bytes) const override;
  const std::byte* memory() const noexcept override { return memory_.bytes(); }
  std::byte* view() override { return memory_.bytes(); }
  std::byte* direct() noexcept override { return memory_.is_pinned() ? memory_.bytes() : nullptr; }
  void populate(size_t offset, size_t size_bytes) override { memory_.memory().populate(offset, size_bytes); }
  void abandon() noexcept override { memory_.abandon(); }
  bool is_abandoned() const noexcept override { return memory_.is_pinned() && memory_.is_abandoned(); }

 protected:
  PinnedMemory memory_;
};

}  // namespace ebbtide
