#pragma once

#include <cstddef>
#include <cstdint>

#include "base/owner.h"
#include "driver/driver.h"

namespace ebbtide {
struct ArenaRange;

// The call that gives a driver object back.
struct Undo {
  enum class Kind { kNone, kUnmap, kTakeBack, kRelease, kAddressFree, kLetGo, kHostFree, kHostUnregister };

  Kind kind = Kind::kNone;
  uint64_t object = 0;  // address or handle
  size_t size_bytes = 0;
  int device = -1;
  // The memory that is held until then, if any: a mapping holds its memory after the handle's release. Of host memory
  // its address.
  CUmemGenericAllocationHandle handle = 0;
  // For kHostUnregister: our own mapping of size_bytes, which goes once the memory in it is no longer pinned.
  void* mapping = nullptr;
  bool is_lent = false;    // for kUnmap: kTakeBack follows (held_addresses.h)
  bool is_import = false;  // for kRelease: the memory is another's, and goes with its last owner

  explicit operator bool() const { return kind != Kind::kNone; }
  // Does it now, or keeps what is left of it (below) if the driver refuses.
  void undo() const noexcept;
};

// Undo calls that failed inside a destructor. A destructor must not throw, and must not lose the object either. So the
// undo is kept here and retried, oldest first, at the next allocation or operation. Order matters: an unmap precedes
// the free of its range.
namespace deferred_undos {

void keep(const Undo& undo) noexcept;
// Keeps a range that a mapping still covers because it could not be undone; it is freed after it. False if there is no
// such mapping.
bool keep_if_mapped(const ArenaRange& range) noexcept;

// Tries every kept undo once. Never throws; undos that fail again stay. may_free_host_memory: no capture can be under
// way in any thread, since cuMemFreeHost and cuMemHostUnregister break it; the undos of virtual memory are harmless.
void retry(bool may_free_host_memory) noexcept;

size_t count() noexcept;
// Memory behind handles that could not be released, and behind mappings that could not be undone: a device's, or with
// -1 the host's.
uint64_t held_bytes(int device) noexcept;

}  // namespace deferred_undos
}  // namespace ebbtide
