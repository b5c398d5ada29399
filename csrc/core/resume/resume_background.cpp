// The other way to bring bytes back: everything is queued on the device before the call returns, and run_device() only
// follows it.
#include <algorithm>

#include "base/error.h"
#include "core/resume/resume.h"
#include "driver/context.h"

namespace ebbtide {

bool Resume::can_deliver() const {
  return std::all_of(work_.begin(), work_.end(), [](const auto& entry) {
    const auto& [device, work] = entry;
    const ContextScope scope(device);
    return work.engine == nullptr || Delivery::is_possible(device);
  });
}

std::unique_ptr<Arrivals> Resume::launch() {
  if (!can_deliver()) return nullptr;
  auto arrivals = std::make_unique<Arrivals>();
  for (auto& [device, work] : work_) {
    if (work.engine) {
      work.delivery = std::make_shared<Delivery>(work.engine->engine(), work.has_files);
      work.delivery->reserve(work.copied_bytes);
    }
    for (ReturningChunk& returning : work.returning) {
      if (work.delivery) plan_delivery(work, returning);
      arrivals->add({returning.address(), returning.chunk->size_bytes}, work.delivery, returning.delivered);
    }
  }
  arrivals->sort();
  // The ring is filled while everything is mapped.
  if (!prepare_deliveries()) return nullptr;
  for (auto& [device, work] : work_) {
    const ContextScope scope(device);
    for (Group& group : work.groups) map(device, work, group);
    if (work.clearing) clear_now(work);
  }
  // Only now: where something was missing on one device, nothing is queued on any.
  for (auto& [device, work] : work_) launch_delivery(device, work);
  for (const ResumedAllocation& resumed : resumed_) resumed.allocation->is_arriving.store(true);
  return arrivals;
}

void Resume::plan_delivery(DeviceWork& work, ReturningChunk& returning) {
  Delivery& delivery = *work.delivery;
  const size_t count_before = delivery.piece_count();
  for (const CopyRange& range : returning.ranges) {
    delivery.add_copy(returning.address() + range.offset, *returning.stored->backup,
                      returning.chunk->offset + range.offset, range.size_bytes);
  }
  visit_values(returning, [&](size_t offset, size_t size_bytes, const kernels::Value& value) {
    if (value == kernels::Value{} && work.groups[returning.group].is_fresh) return;
    for (size_t done = 0; done < size_bytes; done += kernels::kBlockBytes)
      delivery.add_value(returning.address() + offset + done, value, kernels::kBlockBytes);
  });
  if (delivery.piece_count() > count_before) returning.delivered = delivery.piece_count();
}

// False where something is missing that a copy in the foreground does without: pinned memory for tables and words,
// threads.
bool Resume::prepare_deliveries() {
  try {
    for (auto& [device, work] : work_) {
      if (!work.delivery) continue;
      const ContextScope scope(device);
      work.delivery->prepare(work.engine->table(work.delivery->table_bytes()), work.engine->cut().threads);
    }
    return true;
  } catch (const StoreError&) {
  } catch (const StateError&) {
  } catch (const DriverError& error) {
    if (error.code != CUDA_ERROR_OUT_OF_MEMORY) throw;
  }
  for (auto& [device, work] : work_) {
    work.delivery.reset();
    take_fill_table(work);  // as large as it was, or larger: the same memory
  }
  return false;
}

void Resume::launch_delivery(int device, DeviceWork& work) {
  if (!work.delivery) return;
  const ContextScope scope(device);
  work.delivery->launch(*DeviceKernels::of(device));
  work.hold.emplace(core().deferred_frees, device);
}

void Resume::follow_delivery(DeviceWork& work) {
  for (ReturningChunk& returning : work.returning) {
    work.delivery->wait_for(returning.delivered);
    if (work.delivery->arrived() < returning.delivered) break;
    arrive(work, returning);
  }
  work.delivery->finish();
}

// Kernels that wait for bytes which will not come run now, on the present content: only then may the memory be unmapped
// below them.
void Resume::abandon_delivery(int device, DeviceWork& work) noexcept {
  if (!work.hold) return work.delivery.reset();  // nothing was launched: its threads end here
  work.delivery->cancel();
  try {
    work.delivery->finish();
  } catch (...) {
    // The failure is known: it is why this is called, or the caller's wish.
  }
  const bool is_whole = std::all_of(work.returning.begin(), work.returning.end(),
                                    [](const ReturningChunk& returning) { return returning.chunk->is_resident(); });
  if (is_whole) return;
  try {
    synchronize_device(device);
  } catch (...) {
    work.is_in_doubt = true;  // kernels in streams may still run
  }
}

}  // namespace ebbtide
