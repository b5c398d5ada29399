#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include "core/memory/address_ranges.h"
#include "core/state/core.h"

namespace ebbtide {

// A view of stored bytes. They stay readable, and are neither overwritten nor given back, for as long as it lives.
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

// The stored bytes of a range inside one allocation. None while any of it is resident or dropped, or where the store
// can't show its bytes. Blocks kept as one value are written out first. Bytes written through the view come back with
// the resume; the next pause copies these blocks again. Waits for an operation on the tag. Throws InvalidArgument,
// StoreError (no room to write out).
std::optional<BackupView> view_backup(Core& core, const AddressRange& range);

}  // namespace ebbtide
