#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>

#include "core/memory/address_ranges.h"
#include "core/state/core.h"

namespace ebbtide {

// kSnapshot: of bytes that are away, and are neither overwritten nor given back. kWindow: also of a backup that a
// resume retained; the bytes are not given back, and the next pause into this backup refreshes them where they are.
enum class ViewKind { kSnapshot, kWindow };

// A view of stored bytes. They stay readable for as long as it lives.
class BackupView {
 public:
  BackupView(DeferredFrees& frees, std::shared_ptr<BackupRecord> stored, ViewKind kind, std::byte* bytes)
      : frees_(&frees),
        hold_(kind == ViewKind::kSnapshot ? stored->views : stored->windows),
        stored_(std::move(stored)),
        bytes_(bytes) {}
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
// can't show them; a window also shows a range wholly on the device whose backup is complete. Blocks kept as one value
// are written out first. Bytes written through the view come back with the resume, and the next pause copies them
// again. Waits for an operation on the tag. Throws InvalidArgument, StoreError (no room to write out).
std::optional<BackupView> view_backup(Core& core, const AddressRange& range, ViewKind kind = ViewKind::kSnapshot);

}  // namespace ebbtide
