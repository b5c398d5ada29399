#include "core/operation/swapped_memory.h"

#include "base/error.h"
#include "driver/driver.h"

namespace ebbtide {

void SwappedMemory::announce(uint64_t size_bytes) { ++wanted_[size_bytes]; }

void SwappedMemory::create_ahead(const std::vector<uint64_t>& sizes, uint64_t required_bytes, DeviceCharge charge) {
  uint64_t created_bytes = 0;
  for (const uint64_t size_bytes : sizes) {
    if (held_bytes_ + size_bytes > limit_bytes_ || size_bytes > charge.size_bytes()) break;
    Handle handle;
    try {
      handle.memory = PhysicalMemory::create_on_device(size_bytes, device_);
    } catch (const DriverError& error) {
      if (error.code != CUDA_ERROR_OUT_OF_MEMORY) throw;
      limit_bytes_ = held_bytes_ + saturating_subtract(required_bytes, created_bytes);
      break;
    }
    handle.charge = charge.split(size_bytes);
    kept_[size_bytes].push_back(std::move(handle));
    --wanted_[size_bytes];
    held_bytes_ += size_bytes;
    created_bytes += size_bytes;
  }
  if (created_bytes < required_bytes)
    placeholder_ = PhysicalMemory::create_on_device(required_bytes - created_bytes, device_);
  spare_ = std::move(charge);
}

void SwappedMemory::offer(PhysicalMemory& memory, DeviceCharge& charge) {
  const uint64_t size_bytes = memory.size_bytes();
  {
    const std::lock_guard lock(mutex_);
    const auto wanted = wanted_.find(size_bytes);
    if (wanted != wanted_.end() && wanted->second > 0) {
      auto& kept = kept_[size_bytes];
      kept.reserve(kept.size() + 1);
      --wanted->second;
      kept.push_back({std::move(charge), std::move(memory), false});
      changed_.notify_all();
      return;
    }
  }
  memory.release();
  const std::lock_guard lock(mutex_);
  spare_.merge(std::move(charge));
  held_bytes_ -= size_bytes;
  changed_.notify_all();
}

void SwappedMemory::close() noexcept {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
}

SwappedMemory::Handle SwappedMemory::take(uint64_t size_bytes) {
  std::unique_lock lock(mutex_);
  const auto has_handle = [&] {
    const auto kept = kept_.find(size_bytes);
    return kept != kept_.end() && !kept->second.empty();
  };
  const auto has_room = [&] { return held_bytes_ + size_bytes <= limit_bytes_ && spare_.size_bytes() >= size_bytes; };
  changed_.wait(lock, [&] { return has_handle() || has_room() || is_closed_; });
  if (has_handle()) {
    auto& kept = kept_[size_bytes];
    Handle handle = std::move(kept.back());
    kept.pop_back();
    return handle;
  }
  if (!has_room()) throw StateError("the other half of the swap failed before there was room");
  --wanted_[size_bytes];
  held_bytes_ += size_bytes;
  Handle handle;
  handle.charge = spare_.split(size_bytes);
  PhysicalMemory placeholder = std::move(placeholder_);
  lock.unlock();
  placeholder.release();
  handle.memory = PhysicalMemory::create_on_device(size_bytes, device_);
  return handle;
}

}  // namespace ebbtide
