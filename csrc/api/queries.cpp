#include <algorithm>
#include <vector>

#include "api/ebbtide.h"
#include "api/guard.h"
#include "api/view.h"
#include "core/state/core.h"
#include "vmm/deferred_undos.h"

// Tags, allocations, statistics and events. Snapshots are taken under the registry's lock and visited without it, so
// that a visitor may call back.
using namespace ebbtide;
using api::require_given;
using api::with_core;

namespace {

ebbtide_tag_state state_of(const Tag& tag, const ebbtide_tag_info& info) {
  if (info.allocation_count == 0) return EBBTIDE_EMPTY;
  if (tag.is_partial) return EBBTIDE_PARTIAL;
  const bool is_all_here = info.resident_bytes + info.trimmed_bytes == info.size_bytes;
  return is_all_here && info.paused_host_bytes == 0 ? EBBTIDE_RESIDENT : EBBTIDE_PAUSED;
}

ebbtide_tag_info describe(const Tag& tag) {
  const Amounts amounts = tag.total_now();
  ebbtide_tag_info info{};
  info.lease_count = static_cast<int32_t>(tag.leases.size());
#define EBBTIDE_AMOUNT(name) info.name = amounts.name;
#define EBBTIDE_INNER_AMOUNT(name)
#include "core/memory/amounts.def"
#undef EBBTIDE_INNER_AMOUNT
#undef EBBTIDE_AMOUNT
  for (size_t kind = 0; kind < amounts.with_backup.size(); ++kind)
    info.backups |= amounts.with_backup[kind] > 0 ? 1 << kind : 0;
  info.is_hooked = tag.is_hooked.load();
  info.tag = tag.name.c_str();  // which lives as long as the process
  info.state = state_of(tag, info);
  return info;
}

int32_t told(Verdict verdict) {
  return verdict == Verdict::kFilled ? EBBTIDE_VERDICT_CHANGED : static_cast<int32_t>(verdict);
}

// In order, from begin to end (offsets in the allocation), cut where a block ends.
std::vector<ebbtide_stretch> stretches(const Allocation& allocation, const Verdicts* verdicts, size_t begin,
                                       size_t end) {
  std::vector<ebbtide_stretch> found;
  for (const Chunk& chunk : allocation.chunks) {
    const auto place = static_cast<int32_t>(chunk.place.load());
    for (size_t block = chunk.first_block(); block < chunk.end_block(); ++block) {
      const size_t first = std::max(begin, block * kernels::kBlockBytes);
      const size_t last = std::min(end, (block + 1) * kernels::kBlockBytes);
      if (first >= last) continue;
      const auto verdict = told(verdicts == nullptr ? Verdict::kNone : (*verdicts)[block]);
      if (!found.empty() && found.back().place == place && found.back().verdict == verdict) {
        found.back().size_bytes += last - first;
      } else {
        found.push_back({allocation.address() + first, last - first, place, verdict});
      }
    }
  }
  return found;
}

void add_places(const Tag& tag, ebbtide_stats& stats) {
  const Amounts amounts = tag.total_now();
  stats.allocation_count += amounts.allocation_count;
  stats.device_bytes += saturating_subtract(amounts.resident_bytes, amounts.host_bytes);
  stats.host_bytes += amounts.host_bytes;
  stats.stored_bytes += amounts.stored_bytes;
}

}  // namespace

extern "C" {

ebbtide_status ebbtide_visit_tags(ebbtide_visit_tag visit, void* user, ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(visit, "visit");
    std::vector<ebbtide_tag_info> infos;
    core.registry.visit_tags([&](const Tag& tag) { infos.push_back(describe(tag)); });
    for (const ebbtide_tag_info& info : infos) visit(user, &info);
  });
}

ebbtide_status ebbtide_query_tag(const char* tag, bool* found, ebbtide_tag_info* info, ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(tag, "tag");
    const auto fill = [&](const Tag& known) {
      if (info != nullptr) *info = describe(known);
    };
    const bool is_known = core.registry.visit_tag(tag, fill, /*is_required=*/found == nullptr);
    if (found != nullptr) *found = is_known;
  });
}

ebbtide_status ebbtide_visit_allocations(const char* tag, ebbtide_visit_allocation visit, void* user,
                                         ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(visit, "visit");
    std::vector<ebbtide_allocation_info> infos;
    const auto add = [&](const Tag& known) {
      for (const auto& [sequence, allocation] : known.allocations) {
        if (!allocation->is_doomed) infos.push_back(api::describe(*allocation));
      }
    };
    if (tag != nullptr) {
      core.registry.visit_tag(tag, add);
    } else {
      core.registry.visit_tags(add);
    }
    std::sort(infos.begin(), infos.end(), [](const auto& a, const auto& b) { return a.sequence < b.sequence; });
    for (const ebbtide_allocation_info& info : infos) visit(user, &info);
  });
}

ebbtide_status ebbtide_visit_stretches(const void* address, uint64_t size_bytes, ebbtide_visit_stretch visit,
                                       void* user, ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(visit, "visit");
    const auto begin = reinterpret_cast<CUdeviceptr>(address);
    const auto allocation = core.registry.find(begin);
    if (allocation == nullptr) return;
    const size_t offset = begin - allocation->address();
    const size_t end = offset + std::min<uint64_t>(size_bytes, allocation->size_bytes() - offset);
    const auto verdicts = core.registry.read(allocation->verdicts);
    for (const ebbtide_stretch& stretch : stretches(*allocation, verdicts.get(), offset, end)) visit(user, &stretch);
  });
}

ebbtide_status ebbtide_get_stats(ebbtide_stats* stats, ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(stats, "stats");
    ebbtide_stats filled{};
    core.registry.visit_tags([&](const Tag& tag) { add_places(tag, filled); });
    filled.host_held_bytes = core.budgets.host.held_bytes();
    filled.host_available_bytes = core.budgets.host.available_bytes();
    filled.staging_bytes = core.engines.held_bytes();
    filled.deferred_frees = core.deferred_frees.count();
    filled.deferred_undos = deferred_undos::count();
    filled.pinned_bytes = core.budgets.pinned.held_bytes();
    filled.host_pool_bytes = core.host_pool.kept_bytes();
#define EBBTIDE_COUNTER(name) filled.name = core.counters.name;
#include "core/state/counters.def"
#undef EBBTIDE_COUNTER
    *stats = filled;
  });
}

ebbtide_status ebbtide_visit_events(uint64_t after_sequence, ebbtide_visit_event visit, void* user,
                                    ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(visit, "visit");
    for (const EventRecord& record : core.events.after(after_sequence)) {
      const ebbtide_event event = {record.sequence,     record.unix_seconds, record.seconds, record.kind.c_str(),
                                   record.tags.c_str(), record.bytes,        record.copied,  record.detail.c_str()};
      visit(user, &event);
    }
  });
}

}  // extern "C"
