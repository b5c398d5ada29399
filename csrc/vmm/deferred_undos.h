#pragma once

#include <cstddef>
#include <cstdint>

#include "driver/driver.h"

// Undo calls that failed inside a destructor. A destructor must not throw, and must not lose the object either. So the
// undo is kept here and retried, oldest first, at the next allocation or operation. Order matters: an unmap precedes
// the free of its range.
namespace ebbtide {
class Addresses;
}

namespace ebbtide::deferred_undos {

// handle, device: what is mapped there; a mapping holds its memory after the handle's release.
void add_unmap(CUdeviceptr address, size_t size_bytes, CUmemGenericAllocationHandle handle, int device) noexcept;
void add_release(CUmemGenericAllocationHandle handle, size_t size_bytes, int device) noexcept;
void add_address_free(CUdeviceptr address, size_t size_bytes) noexcept;
// Takes over addresses that a mapping still covers because it could not be undone; they are freed after it. False if
// there is no such mapping.
bool keep_if_mapped(Addresses& addresses) noexcept;
void add_host_free(void* bytes) noexcept;  // pinned memory
// Our own memory that is pinned at `bytes`, within a mapping that is undone once the memory is unpinned.
void add_host_unregister(void* bytes, void* mapping, size_t mapping_bytes) noexcept;
// Whether the memory is no longer pinned after this result of cuMemHostUnregister. The end of the driver or of its
// context unpins, too.
bool is_unregistered(CUresult result) noexcept;

// Tries every kept undo once. Never throws; undos that fail again stay. may_free_host_memory: no capture can be under
// way in any thread, since cuMemFreeHost and cuMemHostUnregister break it; the undos of virtual memory are harmless.
void retry(bool may_free_host_memory) noexcept;

size_t count() noexcept;
// Memory behind handles that could not be released, and behind mappings that could not be undone: a device's, or with
// -1 the host's.
uint64_t held_bytes(int device) noexcept;

}  // namespace ebbtide::deferred_undos
