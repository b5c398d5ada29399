#pragma once

#include <cstddef>
#include <cstdint>

#include "driver/driver.h"

// Where driver objects wait whose undo call failed inside a destructor. A destructor must not throw and must not lose the object either: the undo is kept here and
// tried again, oldest first, at the next allocation or operation. Order matters: an unmap precedes the free of its range.
namespace ebbtide::limbo {

// handle, device: what is mapped there; a mapping holds its memory after the handle's release.
void add_unmap(CUdeviceptr address, size_t size_bytes, CUmemGenericAllocationHandle handle, int device) noexcept;
void add_release(CUmemGenericAllocationHandle handle, size_t size_bytes, int device) noexcept;
void add_address_free(CUdeviceptr address, size_t size_bytes) noexcept;
void add_host_free(void* bytes) noexcept;  // pinned memory

// Tries every kept undo once. Never throws; what fails again stays. may_free_host_memory: no capture can be under way in any thread, since cuMemFreeHost breaks it;
// the undos of virtual memory are harmless.
void retry(bool may_free_host_memory) noexcept;

size_t count() noexcept;
// Device memory behind handles that could not be released and mappings that could not be undone.
uint64_t held_bytes(int device) noexcept;

}  // namespace ebbtide::limbo
