#include "core/move/relocations.h"

#include <string>
#include <utility>

#include "base/error.h"

namespace ebbtide {

// torch may hand out memory of a leased tag at any moment, to a thread that would use it while it is not mapped.
TagClaim Demotion::claim() const {
  return {.tags = request().tags,
          .concerns = [](const Allocation& allocation) { return allocation.wants_demotion(); },
          .leases = TagClaim::Leases::kRefused};
}

void Demotion::prepare(const Allocations& allocations) {
  for (const auto& allocation : allocations) add_row(*allocation);
  uint64_t allowed_bytes = request().max_bytes;
  for (Sources& sources : by_handle(allocations)) {
    const std::shared_ptr<Backing>& backing = sources.front().chunk->backing;
    // Of allocations that were named one by one, memory that others share stays.
    if (!request().tags.addresses.empty() && has_others(backing, sources.size())) continue;
    if (backing->memory.size_bytes() > allowed_bytes) continue;
    allowed_bytes -= backing->memory.size_bytes();
    const int device = sources.front().allocation->device;
    add_device(device);
    auto& batches = batches_[device];
    batches.resize(1);
    batches.front().handles.push_back(std::move(sources));
  }
  for (auto& [device, batches] : batches_) take_host_memory(device, batches.front());
}

void Demotion::take_host_memory(int device, Batch& batch) {
  std::vector<uint64_t> fresh_sizes;
  size_t twin_blocks = 0;
  for (Sources& sources : batch.handles) {
    for (Source& source : sources) {
      add_spare(batch, source);
      source.twin = core().host_pool.twins().take(source.chunk->twin);
      source.chunk->twin.reset();
      twin_blocks += source.twin.digests.size();
      if (!source.twin.memory.has_handle()) fresh_sizes.push_back(source.chunk->size_bytes);
    }
  }
  reserve_addresses(batch);
  fresh_[device] = core().host_pool.take(device, fresh_sizes, "the demotion to host memory");
  if (twin_blocks > 0 && core().rules.skip.clean.load()) make_scan(device, batch, twin_blocks);
}

bool Demotion::begin(int device, Batch& batch) {
  auto fresh = fresh_.at(device).begin();
  for (Sources& sources : batch.handles) {
    for (Source& source : sources) {
      Backing& backing = *source.spare->backing;
      const bool has_twin = source.twin.memory.has_handle();
      backing.host_charge = std::move(has_twin ? source.twin.charge : fresh->charge);
      backing.memory = std::move(has_twin ? source.twin.memory : fresh->memory);
      if (!has_twin) {
        ++fresh;
      } else if (batch.scan != nullptr) {
        source.first_scanned = batch.scan->add(source.address(), source.chunk->size_bytes);
      }
    }
  }
  if (batch.scan != nullptr) batch.scan->launch();
  return true;
}

void Demotion::copy(const Batch& batch, Source& source, const Stream& stream) {
  if (batch.scan == nullptr || source.twin.digests.empty()) return Relocation::copy(batch, source, stream);
  const CUdeviceptr to = batch.spare->address() + source.spare->offset;
  for (size_t block = 0; block < source.chunk->block_count(); ++block) {
    const size_t offset = block * kernels::kBlockBytes;
    if (batch.scan->report(source.first_scanned + block).digest == source.twin.digests[block]) {
      source.clean_bytes += kernels::kBlockBytes;
    } else {
      copy_range(to + offset, source.address() + offset, kernels::kBlockBytes, stream);
    }
  }
}

void Demotion::note_moved(int /*device*/, Batch& /*batch*/, const Sources& sources,
                          const std::shared_ptr<Backing>& old) {
  uint64_t freed_bytes = old->memory.size_bytes();
  for (const Source& source : sources) {
    row(*source.allocation).bytes += source.chunk->size_bytes;
    freed_bytes = saturating_subtract(freed_bytes, source.chunk->size_bytes);
  }
  // Shares of the handle that were freed go as well, and count with the first.
  row(*sources.front().allocation).bytes += freed_bytes;
}

// Handles that were never used go back to the pool. The twins of chunks that did not move are gone.
void Demotion::settle() noexcept {
  for (auto& [device, handles] : fresh_) core().host_pool.put_back(device, std::move(handles));
  fresh_.clear();
  Relocation::settle();
}

}  // namespace ebbtide
