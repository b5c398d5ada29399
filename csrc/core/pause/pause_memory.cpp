// How memory leaves: a handle goes when the last byte behind it has landed, or nobody wants it.
#include <algorithm>

#include "base/error.h"
#include "core/pause/pause.h"

namespace ebbtide {

// Of allocations that were named one by one. A trim takes nothing from others: memory that one of them shares stays.
void Pause::leave_what_others_share() {
  const auto has_others = [](const Departure& departure) {
    const std::shared_ptr<Backing>& backing = departure.chunks.front().second->backing;
    return departure.chunks.size() < static_cast<size_t>(backing.use_count());
  };
  for (auto& [device, work] : work_) {
    if (is_trim_) {
      std::erase_if(work.dropped, has_others);
    } else if (std::any_of(work.dropped.begin(), work.dropped.end(), has_others) ||
               std::any_of(work.departures.begin(), work.departures.end(), has_others)) {
      throw StateError(
          "some of these allocations share a handle with others of their tag, with which a resume brought them back, "
          "and "
          "the device has no room to give each a handle of its own: pause the tag, make room, or resume with "
          "EBBTIDE_SHARED_HANDLE at 0");
    }
  }
}

std::map<int, uint64_t> Pause::leaving_bytes() const {
  std::map<int, uint64_t> bytes;
  for (const auto& [device, work] : work_) {
    for (const auto* departures : {&work.departures, &work.dropped}) {
      for (const Departure& departure : *departures) {
        const PhysicalMemory& memory = departure.backing->memory;
        bytes[device] += memory.is_on_host() ? 0 : memory.size_bytes();
      }
    }
  }
  return bytes;
}

// Behind the last job nothing else wants the bus, so its second look follows in the stream, and nobody waits between.
void Pause::submit(DeviceWork& work, Copy& copy, Leaving& leaving) {
  CopyJob job = {.device_address = leaving.allocation->address() + leaving.chunk->offset,
                 .backup = leaving.kept->stored->backup.get(),
                 .offset = leaving.chunk->offset,
                 .ranges = leaving.ranges,
                 .must_compare = core().rules.skip.must_compare.load() && leaving.kept->had_backup};
  leaving.is_followed = &leaving == &work.leaving.back() && keeps_digests(work, leaving);
  if (leaving.is_followed)
    job.then = [&] { work.scan->queue_second_look(leaving.first_scanned, leaving.chunk->block_count()); };
  copy.submit(job);
}

void Pause::land(DeviceWork& work, Leaving& leaving) {
  note_digests(work, leaving);
  Departure& departure = work.departures[leaving.departure];
  if (--departure.missing == 0) leave(work, departure);
}

void Pause::leave(DeviceWork& work, Departure& departure) {
  for (const size_t index : departure.leaving) {
    Kept& kept = *work.leaving[index].kept;
    if (kept.is_attached) continue;
    // Before the device gives the bytes up, so that they are never nowhere.
    core().registry.set_backup(*kept.allocation, kept.stored);
    kept.is_attached = true;
  }
  departure.backing->mapping.unmap();
  note_released();
  for (const auto& [allocation, chunk] : departure.chunks)
    chunk->place.store(Place::kStored, std::memory_order_release);
  for (const size_t index : departure.leaving) {
    const Leaving& leaving = work.leaving[index];
    const Chunk& chunk = *leaving.chunk;
    for (size_t block = chunk.first_block(); block < chunk.end_block(); ++block)
      leaving.kept->stored->blocks[block].has_content = true;
    for (const CopyRange& range : leaving.ranges) {
      row(*leaving.allocation).copied += range.size_bytes;
      touch_blocks(*leaving.kept->stored, leaving.kept->charge,
                   leaving.chunk->first_block() + range.offset / kernels::kBlockBytes,
                   range.size_bytes / kernels::kBlockBytes);
    }
  }
  release_memory(departure);
}

// The physical memory behind chunks that nobody can reach any more goes.
void Pause::release_memory(const Departure& departure) {
  const std::shared_ptr<Backing> keeper = departure.chunks.front().second->backing;  // until all have let go
  Backing& backing = *keeper;
  const auto [first_allocation, first_chunk] = departure.chunks.front();
  if (backing.memory.is_on_host()) {
    const CUdeviceptr address = first_allocation->address() + first_chunk->offset;
    return core().host_pool.recycle(first_allocation->device, address, *first_chunk);
  }
  // What was freed of it goes as well, and counts with the first.
  uint64_t freed_bytes = backing.memory.size_bytes();
  release(first_allocation->device, backing);
  for (const auto& [allocation, chunk] : departure.chunks) {
    chunk->backing = Backing::nothing();
    chunk->twin.reset();
    row(*allocation).bytes += chunk->size_bytes;
    freed_bytes = saturating_subtract(freed_bytes, chunk->size_bytes);
  }
  row(*first_allocation).bytes += freed_bytes;
}

void Pause::drop(DeviceWork& work) {
  work.has_dropped = true;
  for (const Departure& departure : work.dropped) {
    const Chunk& first = *departure.chunks.front().second;
    if (first.is_on_device() || first.is_on_host()) {
      // On the host it may be cleared first: then it is given up from there on.
      if (!first.is_on_host()) departure.backing->mapping.unmap();
      note_released();
      for (const auto& [allocation, chunk] : departure.chunks) {
        chunk->place.store(Place::kDropped, std::memory_order_release);
        chunk->is_detached.store(false);
      }
    }
    release_memory(departure);
  }
}

// Stored bytes that nobody wants. Who looks at them has them as long as he looks.
void Pause::forget_what_is_away() noexcept {
  for (const auto& allocation : chosen_) {
    if (!allocation->is_any_stored()) continue;
    note_released();
    for (Chunk& chunk : allocation->chunks) {
      if (chunk.place.load() == Place::kStored) chunk.place.store(Place::kDropped, std::memory_order_release);
    }
    core().registry.set_backup(*allocation, nullptr);
  }
}

// After a failure: bytes of chunks that did not leave may have been copied already. Their pages go back, and a backup
// that holds nothing goes whole.
void Pause::forget_what_stayed(const Kept& kept) noexcept {
  for (const Chunk& chunk : kept.allocation->chunks) {
    if (!chunk.is_on_device()) continue;
    for (size_t block = chunk.first_block(); block < chunk.end_block(); ++block) {
      StoredBlock& stored = kept.stored->blocks[block];
      if (stored.is_touched) continue;
      // With the pages goes what is known of them: else the next pause would take the block for clean.
      stored.has_digest = false;
      kept.stored->backup->discard(block * kernels::kBlockBytes, kernels::kBlockBytes);
    }
  }
  if (kept.is_attached && !kept.had_backup && !kept.allocation->is_any_stored())
    core().registry.set_backup(*kept.allocation, nullptr);
}

}  // namespace ebbtide
