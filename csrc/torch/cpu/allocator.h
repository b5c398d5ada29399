#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>

#include "torch/cpu/pool.h"

namespace ebbtide::cpu {

// Replaces torch's CPU allocator by one that serves the threads of a region from the region's pool, and passes every
// other request to the previous allocator. Done once in a process and never undone, because tensors hold its deleter.
// False if another allocator has the higher priority and stays.
bool install_allocator();
// Sets the pool that allocate_apart() takes memory from; null: none.
void set_pool_apart(Pool* pool);
// Memory of that pool, or ordinary memory if there is none or it is not open. The region that the thread is in plays no
// part. Throws c10::OutOfMemoryError.
void allocate_apart(size_t size_bytes, c10::DataPtr* data);
// Gives back the free memory of that pool.
void release_apart();
// What tensors of all pools have now, without what is cached.
uint64_t used_bytes();

}  // namespace ebbtide::cpu
