#include "core/resume/resume.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/scope_exit.h"
#include "core/move/backups.h"
#include "core/transfer/copy_run.h"
#include "driver/context.h"

namespace ebbtide {

TagClaim Resume::claim() const {
  const bool is_named = !tags_.addresses.empty();
  return {.tags = tags_,
          .concerns =
              [is_named, only = tags_.only](const Allocation& allocation) {
                // A trimmed allocation comes back only if its address is named.
                if (allocation.is_trimmed && (!is_named || only != nullptr)) return false;
                return allocation.wants_resume() && (only == nullptr || only->contains(allocation));
              },
          .finishes_tags = !is_named && tags_.only == nullptr,
          .takes_stale_memory = false};
}

void Resume::count(Counters& counters, const ReportRow& total) const {
  ++counters.resumes;
  counters.bytes_resumed += total.bytes;
  counters.bytes_to_device += total.copied;
}

void Resume::prepare(const Allocations& allocations) {
  for (const auto& allocation : allocations) {
    add_row(*allocation);
    select(allocation);
  }
  for (auto& [device, work] : work_) {
    work.peers = core().peers.of(device);
    put_in_order(work);
    group(work);
    if (!takes_over_memory()) create_memory(device, work);
    if (!takes_over_memory()) create_memory_by_room(device, work);
    create_host_memory(device, work);
    borrow_engine(device, work);
  }
}

void Resume::select(const std::shared_ptr<Allocation>& allocation) {
  // Memory that an earlier failure left behind a chunk that is away still holds old bytes: never map it again
  // (invariant 2). A copy into it may still be queued (invariant 5).
  if (allocation->has_stale_memory()) synchronize_device(allocation->device);
  const auto stored = allocation->stored;
  // If a caller copies ahead, the backup is kept as spare memory, so that unchanged blocks are not copied again.
  const bool is_wanted = stored != nullptr && (allocation->policy.retain || stored->kind == BackupKind::kPinned);
  const bool is_spare = !request().retain && stored != nullptr && !is_wanted && core().rules.keeps_ahead.load() &&
                        stored->kind == allocation->policy.backup;
  const bool is_retained = stored != nullptr && (request().retain.value_or(is_wanted) || is_spare);
  ResumedAllocation& resumed =
      resumed_.emplace_back(ResumedAllocation{allocation, stored, forgotten_blocks(*allocation, stored.get()),
                                              is_retained, is_spare, allocation->is_any_stored()});
  // Memory that nothing uses comes back as new memory would be made.
  const bool may_spill =
      allocation->is_trimmed && allocation->policy.overflow != Overflow::kNone && !takes_over_memory();
  DeviceWork& work = work_[allocation->device];
  add_device(allocation->device);
  for (Chunk& chunk : allocation->chunks) {
    if (chunk.is_resident()) continue;
    if (chunk.has_stale_memory()) chunk.backing->release();
    const bool is_stored = chunk.place.load() == Place::kStored;
    const bool may_be_on_host = !is_stored && (chunk.home == Place::kHost || may_spill);
    const bool is_on_host = chunk.is_detached.load() ? chunk.is_on_host() : may_be_on_host;
    work.bytes += is_on_host || chunk.is_detached.load() ? 0 : chunk.size_bytes;
    ReturningChunk& returning =
        work.returning.emplace_back(ReturningChunk{.of = &resumed,
                                                   .chunk = &chunk,
                                                   .stored = is_stored ? stored.get() : nullptr,
                                                   .is_dropped = chunk.place.load() == Place::kDropped,
                                                   .is_on_host = is_on_host});
    add_ranges(work, returning);
  }
}

// Blocks whose tensors died while they were away come back like dropped ones. If there is a view of the stored bytes,
// all of them stay as they are.
std::vector<bool> Resume::forgotten_blocks(const Allocation& allocation, const BackupRecord* stored) {
  if (stored == nullptr || request().unused.empty() || stored->is_looked_at()) return {};
  return unused_blocks(core(), request(), allocation);
}

// The chunk's block of this number, as it comes back. The record itself changes when that has happened.
StoredBlock Resume::block_of(const ReturningChunk& returning, size_t index) const {
  const size_t number = returning.chunk->first_block() + index;
  StoredBlock block = returning.stored->blocks[number];
  if (!returning.of->unused.empty() && returning.of->unused[number])
    block.mark_unused(must_poison_ ? kPoison : kernels::Value{});
  return block;
}

void Resume::add_ranges(DeviceWork& work, ReturningChunk& returning) {
  visit_values(returning, [&](size_t /*offset*/, size_t size_bytes, const kernels::Value& value) {
    work.has_poison |= value == kPoison;
    if (value != kernels::Value{} && value != kPoison) work.fill_count += size_bytes / kernels::kBlockBytes;
  });
  if (returning.stored == nullptr) return;
  for (size_t index = 0; index < returning.chunk->block_count(); ++index) {
    if (block_of(returning, index).is_constant) continue;
    work.copied_bytes += kernels::kBlockBytes;
    work.staged_bytes += returning.stored->backup->direct() == nullptr ? kernels::kBlockBytes : 0;
    add_block(returning.ranges, index * kernels::kBlockBytes);
  }
  work.has_files |= !returning.ranges.empty() && returning.stored->kind == BackupKind::kDisk;
}

// The ranges that the caller named come first, the rest in the order of allocation.
void Resume::put_in_order(DeviceWork& work) {
  if (request().order.empty()) return;
  auto& all = work.returning;
  std::vector<size_t> by_address(all.size());
  std::iota(by_address.begin(), by_address.end(), size_t{0});
  std::sort(by_address.begin(), by_address.end(),
            [&](size_t a, size_t b) { return all[a].address() < all[b].address(); });
  std::vector<size_t> ranks(all.size(), request().order.size());
  for (size_t rank = 0; rank < request().order.size(); ++rank) {
    const AddressRange& range = request().order[rank];
    auto index = std::partition_point(by_address.begin(), by_address.end(), [&](size_t each) {
      return all[each].address() + all[each].chunk->size_bytes <= range.address;
    });
    for (; index != by_address.end() && all[*index].address() < range.end(); ++index) {
      ranks[*index] = std::min(ranks[*index], rank);
    }
  }
  std::vector<size_t> order(all.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return ranks[a] < ranks[b]; });
  std::vector<ReturningChunk> ordered;
  ordered.reserve(all.size());
  for (const size_t index : order) ordered.push_back(std::move(all[index]));
  all = std::move(ordered);
}

void Resume::borrow_engine(int device, DeviceWork& work) {
  // Memory that changes hands may have to be cleared.
  if (work.copied_bytes == 0 && work.fill_count == 0 && !work.has_poison && !takes_over_memory()) {
    const bool may_clear =
        std::any_of(work.groups.begin(), work.groups.end(), [](const Group& each) { return !each.is_fresh; });
    if (!may_clear) return;
    const ContextScope scope(device);
    work.clearing = std::make_unique<Stream>(Stream::create());
    return;
  }
  policy::CopyNeed need = copy_need(work.staged_bytes, 0);
  need.is_to_device = true;
  need.has_files = work.has_files;
  need.devices = static_cast<int>(work_.size());
  need.is_swap = takes_over_memory();
  work.engine = std::make_unique<EnginePool::Loan>(core().engines.borrow(device, need));
  take_fill_table(work);
}

void Resume::take_fill_table(DeviceWork& work) {
  if (work.fill_count == 0) return;
  work.fills = reinterpret_cast<kernels::BlockFill*>(work.engine->table(work.fill_count * sizeof(kernels::BlockFill)));
}

void Resume::run_device(int device) {
  DeviceWork& work = work_.at(device);
  if (work.delivery) return follow_delivery(work);
  // Whatever happens, nothing may be queued into memory that goes back.
  const ScopeExit end([&]() noexcept { abandon_fills(work); });
  CopyRun<ReturningChunk> run(
      work.engine.get(), CopyDirection::kToDevice, [&](const ReturningChunk& returning) { arrive(work, returning); },
      takes_over_memory());
  for (ReturningChunk& returning : work.returning) {
    if (Group& group = work.groups[returning.group]; !group.backing->mapping.is_mapped()) map(device, work, group);
    fill(work, returning);
    Backup* const backup = returning.stored == nullptr ? nullptr : returning.stored->backup.get();
    run.submit(returning, {returning.address(), backup, returning.chunk->offset, returning.ranges});
  }
  run.finish();
  end_fills(work);
}

const Stream& Resume::side_stream(DeviceWork& work) {
  return work.engine ? work.engine->engine().side_stream() : *work.clearing;
}

void Resume::set_bytes(DeviceWork& work, ReturningChunk& returning, size_t offset, size_t size_bytes,
                       unsigned char value) {
  work.is_filling = returning.has_fills = true;
  check(driver().cuMemsetD8Async(returning.address() + offset, value, size_bytes, side_stream(work).get()),
        "cuMemsetD8Async", "size=" + std::to_string(size_bytes));
}

// What a resume in the background leaves to no kernel.
void Resume::clear_now(DeviceWork& work) {
  const ScopeExit end([&]() noexcept { abandon_fills(work); });
  for (ReturningChunk& returning : work.returning) fill(work, returning);
  if (work.is_filling) side_stream(work).synchronize();
  work.is_filling = false;
  for (Group& group : work.groups) group.is_fresh = true;
  work.clearing.reset();
}

// Blocks of one value, and, in memory that was used before, of zeros.
void Resume::fill(DeviceWork& work, ReturningChunk& returning) {
  const bool may_stay = work.groups[returning.group].is_fresh || (returning.is_dropped && !hides_old_bytes());
  const size_t first_fill = work.fills_used;
  visit_values(returning, [&](size_t offset, size_t size_bytes, const kernels::Value& value) {
    if (value == kernels::Value{} || value == kPoison) {
      if (value == kPoison || !may_stay)
        set_bytes(work, returning, offset, size_bytes, value == kPoison ? kPoisonByte : 0);
      return;
    }
    for (size_t done = 0; done < size_bytes; done += kernels::kBlockBytes)
      work.fills[work.fills_used++] = {returning.address() + offset + done, value};
  });
  if (work.fills_used == first_fill) return;
  const DeviceKernels* const kernels = DeviceKernels::of(returning.allocation().device);
  if (kernels == nullptr) throw StateError("the kernels that found constant blocks can't be loaded any more");
  work.is_filling = returning.has_fills = true;
  kernels->fill(work.engine->engine().side_stream().get(), work.fills + first_fill,
                static_cast<uint32_t>(work.fills_used - first_fill));
}

void Resume::abandon_fills(DeviceWork& work) noexcept {
  if (!work.is_filling) return;
  work.is_filling = false;
  if (work.engine) {
    work.engine->engine().settle(side_stream(work));
    return;
  }
  try {
    work.clearing->synchronize();
  } catch (const DriverError&) {
    work.is_in_doubt = true;
  }
}

void Resume::arrive(DeviceWork& work, const ReturningChunk& returning) {
  Group& group = work.groups[returning.group];
  if (--group.missing > 0) return;
  const bool has_fills = std::any_of(group.members.begin(), group.members.end(),
                                     [&](size_t index) { return work.returning[index].has_fills; });
  if (!has_fills || !work.is_filling) return note_arrivals(work, group);
  // Not waited for here: the next group is mapped meanwhile.
  work.filled.push_back(returning.group);
  if (side_stream(work).is_idle()) note_filled(work);
}

void Resume::end_fills(DeviceWork& work) {
  if (!work.is_filling) return;
  side_stream(work).synchronize();
  note_filled(work);
}

void Resume::note_filled(DeviceWork& work) {
  work.is_filling = false;
  for (const size_t index : std::exchange(work.filled, {})) note_arrivals(work, work.groups[index]);
}

void Resume::note_arrivals(DeviceWork& work, const Group& group) {
  note_released();
  for (const size_t index : group.members) note_arrival(group, work.returning[index]);
}

void Resume::note_arrival(const Group& group, ReturningChunk& returning) {
  Chunk& chunk = *returning.chunk;
  ReportRow& entry = row(returning.allocation());
  entry.bytes += group.wants_device_memory() ? chunk.size_bytes : 0;
  returning.of->allocation->is_paused.store(false);
  chunk.place.store(group.is_on_host ? Place::kHost : Place::kDevice, std::memory_order_release);
  chunk.is_detached.store(false, std::memory_order_release);
  chunk.home = chunk.place.load();
  if (returning.stored == nullptr) return;
  for (size_t index = 0; index < chunk.block_count(); ++index) {
    StoredBlock& stored = returning.stored->blocks[chunk.first_block() + index];
    stored = block_of(returning, index);
    (stored.is_unused ? entry.unused : stored.is_constant ? entry.constant : entry.copied) += kernels::kBlockBytes;
  }
  if (!returning.of->is_retained && !returning.stored->is_looked_at()) forget(returning);
}

// The chunk's backup has done its duty: its pages go back now, beside the copies of the others.
void Resume::forget(ReturningChunk& returning) {
  BackupRecord& stored = *returning.stored;
  if (stored.kind != BackupKind::kRam || stored.is_pinned()) return;  // goes whole, at the end
  const Chunk& chunk = *returning.chunk;
  stored.backup->discard(chunk.offset, chunk.size_bytes);
  uint64_t bytes = 0;
  for (size_t block = chunk.first_block(); block < chunk.first_block() + chunk.block_count(); ++block) {
    bytes += stored.blocks[block].is_touched ? kernels::kBlockBytes : 0;
    stored.blocks[block].is_touched = stored.blocks[block].has_digest = stored.blocks[block].has_content = false;
  }
  stored.charge.give_back_touched(bytes);
}

// Those of which nothing had to come back, too.
void Resume::run_last() {
  for (const ResumedAllocation& resumed : resumed_) resumed.allocation->is_paused.store(false);
}

void Resume::settle() noexcept {
  for (auto& [device, work] : work_) abandon_delivery(device, work);
  for (auto& [device, work] : work_) {
    give_back_unused(work);
    for (const ReturningChunk& returning : work.returning) {
      Chunk& chunk = *returning.chunk;
      if (!chunk.is_resident() && !chunk.backing->has_memory()) chunk.backing = Backing::nothing();
    }
  }
  work_.clear();
  for (const ResumedAllocation& resumed : resumed_) {
    Allocation& allocation = *resumed.allocation;
    allocation.is_arriving.store(false);
    if (resumed.stored == nullptr) continue;
    if (!allocation.wants_resume()) resumed.stored->is_spare = resumed.is_spare;
    // The backup has done its duty once everything is back, unless it is retained. An open view keeps it alive, and
    // then it is not retained: the next pause would write into it.
    const bool is_needed = resumed.is_retained && !resumed.stored->has_views();
    if (resumed.was_stored && !allocation.is_away() && !is_needed) core().registry.replace(allocation.stored, nullptr);
  }
  resumed_.clear();
}

}  // namespace ebbtide
