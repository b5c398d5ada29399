#include "core/operation/swapped_memory.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "driver/driver.h"
#include "vmm/late_memory.h"

namespace ebbtide {

void SwappedMemory::announce(const HandleKind& kind) { ++wanted_[kind]; }

void SwappedMemory::create_ahead(const std::vector<HandleKind>& handles, uint64_t required_bytes, DeviceCharge charge) {
  uint64_t created_bytes = 0;
  late_memory::wait_for(device_, required_bytes);
  for (const HandleKind& kind : handles) {
    const uint64_t size_bytes = kind.size_bytes;
    if (held_bytes_ + size_bytes > limit_bytes_ || size_bytes > charge.size_bytes()) break;
    Handle handle;
    try {
      handle.memory = PhysicalMemory::create_on_device(size_bytes, device_, kind.is_exportable);
    } catch (const DriverError& error) {
      if (error.code != CUDA_ERROR_OUT_OF_MEMORY) throw;
      limit_bytes_ = held_bytes_ + saturating_subtract(required_bytes, created_bytes);
      break;
    }
    handle.charge = charge.split(size_bytes);
    kept_[kind].push_back(std::move(handle));
    --wanted_[kind];
    held_bytes_ += size_bytes;
    created_bytes += size_bytes;
  }
  while (created_bytes < required_bytes) {
    const uint64_t size_bytes = std::min(required_bytes - created_bytes, PhysicalMemory::most_bytes());
    placeholders_.push_back(PhysicalMemory::create_on_device(size_bytes, device_));
    created_bytes += size_bytes;
  }
  spare_ = std::move(charge);
}

size_t SwappedMemory::wanted(const HandleKind& kind) {
  const std::lock_guard lock(mutex_);
  const auto found = wanted_.find(kind);
  return found == wanted_.end() ? 0 : found->second;
}

void SwappedMemory::offer(PhysicalMemory& memory, DeviceCharge& charge) {
  const HandleKind kind = memory.kind();
  {
    const std::lock_guard lock(mutex_);
    const auto wanted = wanted_.find(kind);
    if (wanted != wanted_.end() && wanted->second > 0) {
      auto& kept = kept_[kind];
      kept.reserve(kept.size() + 1);
      --wanted->second;
      kept.push_back({std::move(charge), std::move(memory), false});
      if (const auto promised = promised_.find(kind); promised != promised_.end() && promised->second > 0)
        --promised->second;
      changed_.notify_all();
      return;
    }
  }
  memory.release();
  note_released(kind.size_bytes, std::move(charge));
}

void SwappedMemory::note_released(uint64_t size_bytes, DeviceCharge charge) {
  const std::lock_guard lock(mutex_);
  spare_.merge(std::move(charge));
  held_bytes_ = saturating_subtract(held_bytes_, size_bytes);
  changed_.notify_all();
}

void SwappedMemory::close() noexcept {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
}

SwappedMemory::Handle SwappedMemory::take(const HandleKind& kind, std::chrono::seconds patience) {
  const uint64_t size_bytes = kind.size_bytes;
  std::unique_lock lock(mutex_);
  const auto has_handle = [&] {
    const auto kept = kept_.find(kind);
    return kept != kept_.end() && !kept->second.empty();
  };
  const auto has_room = [&] {
    const auto promised = promised_.find(kind);
    if (promised != promised_.end() && promised->second > 0) return false;
    return held_bytes_ + size_bytes <= limit_bytes_ && spare_.size_bytes() >= size_bytes;
  };
  // Each change begins the wait anew: a large handle takes its time.
  const auto is_over = [&] { return has_handle() || has_room() || is_closed_; };
  while (!is_over()) {
    if (changed_.wait_for(lock, patience) == std::cv_status::timeout && !is_over())
      throw StateError("the other half of the swap has given nothing for " + std::to_string(patience.count()) + " s");
  }
  if (has_handle()) {
    auto& kept = kept_[kind];
    Handle handle = std::move(kept.back());
    kept.pop_back();
    return handle;
  }
  if (!has_room()) throw StateError("the other half of the swap failed before there was room");
  --wanted_[kind];
  held_bytes_ += size_bytes;
  Handle handle;
  handle.charge = spare_.split(size_bytes);
  std::vector<PhysicalMemory> placeholders = std::exchange(placeholders_, {});
  lock.unlock();
  for (PhysicalMemory& each : placeholders) each.release();
  handle.memory = late_memory::retry(
      device_, size_bytes, [&] { return PhysicalMemory::create_on_device(size_bytes, device_, kind.is_exportable); });
  return handle;
}

}  // namespace ebbtide
