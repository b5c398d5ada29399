#include "core/move/relocations.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "base/error.h"
#include "core/state/shortage.h"

namespace ebbtide {

bool is_any_shared(const Allocations& allocations) {
  std::map<const Backing*, std::pair<const Chunk*, size_t>> counts;
  for (const auto& allocation : allocations) {
    for (const Chunk& chunk : allocation->chunks) {
      if (!Backing::is_shared(chunk.backing)) continue;
      auto& [first, count] = counts[chunk.backing.get()];
      first = &chunk;
      ++count;
    }
  }
  return std::any_of(counts.begin(), counts.end(), [](const auto& entry) {
    const auto& [first, count] = entry.second;
    return has_others(first->backing, count);
  });
}

TagClaim Separation::claim() const {
  return {.tags = request().tags,
          .concerns = [](const Allocation& allocation) { return allocation.device_bytes() > 0; },
          .is_among_all = true,
          .leases = TagClaim::Leases::kRefused};
}

void Separation::prepare(const Allocations& allocations) {
  for (const auto& allocation : allocations) add_row(*allocation);
  const std::set<CUdeviceptr> named(request().tags.addresses.begin(), request().tags.addresses.end());
  for (Sources& sources : by_handle(allocations)) {
    const auto named_count = static_cast<size_t>(std::count_if(sources.begin(), sources.end(), [&](const Source& each) {
      return named.contains(each.allocation->address());
    }));
    if (named_count == 0 || !has_others(sources.front().chunk->backing, named_count)) continue;
    const int device = sources.front().allocation->device;
    add_device(device);
    batches_[device].emplace_back().handles.push_back(std::move(sources));
  }
  const auto size_of = [](const Batch& batch) {
    const Sources& sources = batch.handles.front();
    return std::accumulate(sources.begin(), sources.end(), uint64_t{0},
                           [](uint64_t sum, const Source& each) { return sum + each.chunk->size_bytes; });
  };
  for (auto& [device, batches] : batches_)
    std::stable_sort(batches.begin(), batches.end(),
                     [&](const Batch& one, const Batch& other) { return size_of(one) < size_of(other); });
}

bool Separation::begin(int device, Batch& batch) {
  try {
    for (Source& source : batch.handles.front()) add_device_spare(batch, source);
    reserve_addresses(batch);
    for (const Source& source : batch.handles.front()) map_spare(device, batch, source);
  } catch (const Error& error) {
    if (!is_device_shortage(error)) throw;
    if (batch.spare != nullptr) core().deferred_frees.destroy(std::move(batch.spare));
    return false;
  }
  return true;
}

}  // namespace ebbtide
