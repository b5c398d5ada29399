#include "core/pause/removal.h"

#include <algorithm>
#include <utility>

#include "driver/context.h"

namespace ebbtide {

LeavingHandle& Removal::add_to_handle(Handles& handles, LeavingChunk leaving) {
  LeavingHandle*& handle = handle_of_[leaving.chunk->backing.get()];
  if (handle == nullptr) handle = &handles.emplace_back();
  handle->chunks.push_back(std::move(leaving));
  return *handle;
}

bool Removal::has_others(const LeavingHandle& handle) {
  return ebbtide::has_others(handle.chunks.front().chunk->backing, handle.chunks.size());
}

void Removal::drop(int device) {
  const auto found = dropped_.find(device);
  if (found == dropped_.end()) return;
  for (const LeavingHandle& handle : std::exchange(found->second, {})) {
    const Chunk& first = *handle.chunks.front().chunk;
    if (first.is_on_device() || first.is_on_host()) {
      // On the host it may be cleared first: then it is given up from there on.
      if (!first.is_on_host()) first.backing->mapping.unmap();
      note_released();
      for (const LeavingChunk& each : handle.chunks) {
        each.chunk->place.store(Place::kDropped, std::memory_order_release);
        each.chunk->is_detached.store(false);
      }
    }
    release_memory(handle);
  }
}

void Removal::drop_all() {
  for (const auto& [device, handles] : dropped_) {
    if (handles.empty()) continue;
    const ContextScope scope(device);
    drop(device);
  }
}

void Removal::release_memory(const LeavingHandle& handle) {
  const LeavingChunk& first = handle.chunks.front();
  const int device = first.allocation->device;
  const std::shared_ptr<Backing> backing = first.chunk->backing;  // until all have let go
  if (backing->memory.is_on_host()) return core().host_pool.recycle(device, first.address(), *first.chunk);
  // Shares that were freed go as well, and count with the first.
  uint64_t freed_bytes = backing->memory.size_bytes();
  release(device, *backing);
  for (const LeavingChunk& each : handle.chunks) {
    each.chunk->backing = Backing::nothing();
    each.chunk->twin.reset();
    row(*each.allocation).bytes += each.chunk->size_bytes;
    freed_bytes = saturating_subtract(freed_bytes, each.chunk->size_bytes);
  }
  row(*first.allocation).bytes += freed_bytes;
}

void Removal::forget_backup_if_dropped(Allocation& allocation) noexcept {
  const bool is_dropped = std::all_of(allocation.chunks.begin(), allocation.chunks.end(),
                                      [](const Chunk& chunk) { return chunk.place.load() == Place::kDropped; });
  if (is_dropped) core().registry.replace(allocation.stored, nullptr);
}

}  // namespace ebbtide
