#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "core/saver.h"

namespace ebbtide {

// Somebody's sight of stored bytes. They stay readable, and are neither overwritten nor given back, for as long as it lives.
struct BackupView {
  std::shared_ptr<Stored> stored;
  std::shared_ptr<void> hold;
  std::byte* bytes = nullptr;
};

// The stored bytes of the range, which lies in one allocation; none while any of it is resident or dropped, or where the store can't show them. Blocks that are kept as one value are written out
// first. Writable: what is written there comes back with the resume. Waits for an operation on the allocation's tag. Throws InvalidArgument, StoreError (no room to write out).
std::optional<BackupView> view_backup(Saver& saver, const AddressRange& range, bool is_writable);

}  // namespace ebbtide
