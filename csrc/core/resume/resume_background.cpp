// The other way to bring bytes back: everything is queued on the device before the call returns, and run_device() only follows it.
#include <algorithm>

#include "base/error.h"
#include "core/resume/resume.h"
#include "driver/context.h"

namespace ebbtide {

bool Resume::can_deliver() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& entry) {
    const auto& [device, part] = entry;
    const ContextScope scope(device);
    return part.engine == nullptr || Delivery::is_possible(device);
  });
}

std::unique_ptr<Arrivals> Resume::launch() {
  if (!can_deliver()) return nullptr;
  auto arrivals = std::make_unique<Arrivals>();
  for (auto& [device, part] : parts_) {
    if (part.engine) {
      part.delivery = std::make_shared<Delivery>(part.engine->engine(), part.has_files);
      part.delivery->reserve(part.copied_bytes);
    }
    for (Returning& returning : part.returning) {
      if (part.delivery) plan_delivery(part, returning);
      arrivals->add({returning.address(), returning.chunk->size_bytes}, part.delivery, returning.delivered);
    }
  }
  arrivals->sort();
  // The ring is filled while everything is mapped.
  if (!prepare_deliveries()) return nullptr;
  for (auto& [device, part] : parts_) {
    const ContextScope scope(device);
    for (Group& group : part.groups) map(device, part, group);
  }
  // Only now: where something was missing on one device, nothing is queued on any.
  for (auto& [device, part] : parts_) launch_delivery(device, part);
  return arrivals;
}

void Resume::plan_delivery(DevicePart& part, Returning& returning) {
  if (returning.stored == nullptr) return;
  Delivery& delivery = *part.delivery;
  const size_t count_before = delivery.piece_count();
  for (const CopyRange& range : returning.ranges) {
    delivery.add_copy(returning.address() + range.offset, *returning.stored->backup,
                      returning.chunk->offset + range.offset, range.size_bytes);
  }
  for (size_t index = 0; index < returning.chunk->block_count(); ++index) {
    const StoredBlock& block = returning.stored->blocks[returning.chunk->first_block() + index];
    if (!block.is_constant || block.value == kernels::Value{}) continue;  // its memory is fresh, and reads as zeros
    delivery.add_value(returning.address() + index * kernels::kBlockBytes, block.value, kernels::kBlockBytes);
  }
  if (delivery.piece_count() > count_before) returning.delivered = delivery.piece_count();
}

// False where something is missing that a copy in the foreground does without: pinned memory for tables and words, threads.
bool Resume::prepare_deliveries() {
  try {
    for (auto& [device, part] : parts_) {
      if (!part.delivery) continue;
      const ContextScope scope(device);
      part.delivery->prepare(part.engine->table(part.delivery->table_bytes()), part.engine->cut().threads);
    }
    return true;
  } catch (const StoreError&) {
  } catch (const StateError&) {
  } catch (const DriverError& error) {
    if (error.code != CUDA_ERROR_OUT_OF_MEMORY) throw;
  }
  for (auto& [device, part] : parts_) {
    part.delivery.reset();
    take_fill_table(part);  // as large as it was, or larger: the same memory
  }
  return false;
}

void Resume::launch_delivery(int device, DevicePart& part) {
  if (!part.delivery) return;
  const ContextScope scope(device);
  part.delivery->launch(*DeviceKernels::of(device));
  part.hold.emplace(core().deferred_frees, device);
}

void Resume::follow_device(int device) {
  DevicePart& part = parts_.at(device);
  // Nothing had to be copied: its memory is mapped, and all of it is there.
  if (!part.delivery) return run_device(device);
  for (Returning& returning : part.returning) {
    part.delivery->wait_for(returning.delivered);
    if (part.delivery->arrived() < returning.delivered) break;
    arrive(part, returning);
  }
  part.delivery->finish();
}

// Kernels that streams have queued behind bytes that will not come run now, on what is there: only then may it be unmapped below them.
void Resume::abandon_delivery(int device, DevicePart& part) noexcept {
  if (!part.hold) return part.delivery.reset();  // nothing was launched: its threads end here
  part.delivery->give_up();
  try {
    part.delivery->finish();
  } catch (...) {
    // What failed is known: it is why this is called, or the caller's wish.
  }
  const bool is_whole = std::all_of(part.returning.begin(), part.returning.end(),
                                    [](const Returning& returning) { return returning.chunk->is_resident(); });
  if (is_whole) return;
  try {
    synchronize_device(device);
  } catch (...) {
    part.is_in_doubt = true;  // what streams have queued may still run
  }
}

}  // namespace ebbtide
