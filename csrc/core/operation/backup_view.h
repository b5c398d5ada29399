#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include "core/memory/address_ranges.h"
#include "core/state/core.h"

namespace ebbtide {

// Somebody's sight of stored bytes. They stay readable, and are neither overwritten nor given back, for as long as it lives.
class BackupView {
 public:
  BackupView(DeferredFrees& frees, std::shared_ptr<BackupRecord> stored, std::byte* bytes)
      : frees_(&frees), hold_(stored->views), stored_(std::move(stored)), bytes_(bytes) {}
  BackupView(BackupView&& other) noexcept = default;
  BackupView& operator=(BackupView&&) = delete;
  ~BackupView() {
    hold_.reset();
    if (stored_ != nullptr) frees_->let_go(std::move(stored_));
  }
  std::byte* bytes() const { return bytes_; }

 private:
  DeferredFrees* frees_;
  std::shared_ptr<void> hold_;
  std::shared_ptr<BackupRecord> stored_;
  std::byte* bytes_;
};

// The stored bytes of the range, which lies in one allocation; none while any of it is resident or dropped, or where the store can't show them. Blocks that are kept as one value are written out
// first. What is written there comes back with the resume: no pause believes what it knew of these blocks before. Waits for an operation on the allocation's tag. Throws InvalidArgument, StoreError (no room to write out).
std::optional<BackupView> view_backup(Core& core, const AddressRange& range);

}  // namespace ebbtide
