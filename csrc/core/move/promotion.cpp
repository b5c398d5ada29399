#include "core/move/relocations.h"

#include <utility>

#include "base/error.h"
#include "core/allocate/room.h"
#include "core/state/shortage.h"

namespace ebbtide {

TagClaim Promotion::claim() const {
  return {.tags = request().tags,
          .concerns = [](const Allocation& allocation) { return allocation.wants_promotion(); },
          .leases = TagClaim::Leases::kRefused};
}

void Promotion::prepare(const Allocations& allocations) {
  std::map<int, Sources> sources;
  for (const auto& allocation : allocations) {
    add_row(*allocation);
    for (Chunk& chunk : allocation->chunks) {
      if (chunk.is_on_host() && chunk.is_resident()) sources[allocation->device].push_back({allocation, &chunk});
    }
  }
  for (auto& [device, all] : sources) {
    Batch batch = create_memory(device, std::move(all));
    if (batch.handles.empty()) continue;
    reserve_addresses(batch);
    if (request().keeps_host && core().rules.skip.clean.load())
      make_scan(device, batch, batch.spare->chunks.back().end_block());
    batches_[device].push_back(std::move(batch));
    add_device(device);
  }
}

void Promotion::note_stop(int device, uint64_t chunk_bytes, uint64_t usable_bytes) {
  add_note(device, "the next chunk has " + format_bytes(chunk_bytes) + ", and promotions may use " +
                       format_bytes(usable_bytes) + " more");
}

Relocation::Batch Promotion::create_memory(int device, Sources sources) {
  Batch batch;
  policy::DeviceRoom room = look_at_device(core(), device);
  uint64_t size_bytes = 0;
  for (Source& source : sources) {
    const uint64_t chunk_bytes = source.chunk->size_bytes;
    if (chunk_bytes > request().max_bytes - size_bytes) break;
    const uint64_t usable_bytes = policy::usable_bytes(room, source.allocation->size_bytes());
    if (chunk_bytes > usable_bytes) {
      note_stop(device, chunk_bytes, usable_bytes);
      break;
    }
    try {
      add_device_spare(batch, source);
    } catch (const Error& error) {
      if (!is_device_shortage(error)) throw;
      note_stop(device, chunk_bytes, 0);
      break;
    }
    batch.handles.emplace_back().push_back(std::move(source));
    room.take(chunk_bytes);
    size_bytes += chunk_bytes;
  }
  return batch;
}

void Promotion::note_copied(Batch& batch) {
  if (batch.scan == nullptr) return;
  for (const Chunk& spare : batch.spare->chunks)
    batch.scan->add(batch.spare->address() + spare.offset, spare.size_bytes);
  batch.scan->launch();
  // Waits for the last: the blocks lose this address next.
  for (size_t block = 0; block < batch.spare->chunks.back().end_block(); ++block) batch.scan->report(block);
}

void Promotion::note_moved(int device, Batch& batch, const Sources& sources, const std::shared_ptr<Backing>& old) {
  const Source& source = sources.front();
  row(*source.allocation).bytes += source.chunk->size_bytes;
  if (keep_host_memory(batch, source, *old)) return;
  source.spare->backing = old;
  if (core().host_pool.capacity_bytes() == 0) return;
  try {
    // Behind the spare address the pool can clear it.
    old->mapping = Mapping::map(batch.spare->address() + source.spare->offset, old->memory, device);
  } catch (...) {
    // Then it goes to the system.
  }
}

// As the chunk's twin.
bool Promotion::keep_host_memory(const Batch& batch, const Source& source, Backing& old) noexcept {
  if (batch.scan == nullptr) return false;
  try {
    HostTwin twin;
    for (size_t block = source.spare->first_block(); block < source.spare->end_block(); ++block)
      twin.digests.push_back(batch.scan->report(block).digest);
    twin.charge = std::move(old.host_charge);
    twin.memory = std::move(old.memory);
    source.chunk->twin = core().host_pool.twins().keep(std::move(twin));
  } catch (const std::exception&) {
    // It goes to the system.
  }
  return !old.has_memory();
}

}  // namespace ebbtide
