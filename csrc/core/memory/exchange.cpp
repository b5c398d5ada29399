#include "core/memory/exchange.h"

#include "base/error.h"
#include "driver/driver.h"

namespace ebbtide {

void Exchange::announce(uint64_t size_bytes) { ++wanted_[size_bytes]; }

void Exchange::create_ahead(const std::vector<uint64_t>& sizes, uint64_t required_bytes, DeviceCharge charge) {
  uint64_t created_bytes = 0;
  for (const uint64_t size_bytes : sizes) {
    if (held_bytes_ + size_bytes > limit_bytes_ || size_bytes > charge.size_bytes()) break;
    Piece piece;
    try {
      piece.memory = PhysicalMemory::create_on_device(size_bytes, device_);
    } catch (const DriverError& error) {
      if (error.code != CUDA_ERROR_OUT_OF_MEMORY) throw;
      limit_bytes_ = held_bytes_ + saturating_subtract(required_bytes, created_bytes);
      break;
    }
    piece.charge = charge.split(size_bytes);
    kept_[size_bytes].push_back(std::move(piece));
    --wanted_[size_bytes];
    held_bytes_ += size_bytes;
    created_bytes += size_bytes;
  }
  if (created_bytes < required_bytes)
    placeholder_ = PhysicalMemory::create_on_device(required_bytes - created_bytes, device_);
  spare_ = std::move(charge);
}

void Exchange::offer(PhysicalMemory& memory, DeviceCharge& charge) {
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

void Exchange::close() noexcept {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
}

Exchange::Piece Exchange::take(uint64_t size_bytes) {
  std::unique_lock lock(mutex_);
  const auto has_piece = [&] {
    const auto kept = kept_.find(size_bytes);
    return kept != kept_.end() && !kept->second.empty();
  };
  const auto has_room = [&] { return held_bytes_ + size_bytes <= limit_bytes_ && spare_.size_bytes() >= size_bytes; };
  changed_.wait(lock, [&] { return has_piece() || has_room() || is_closed_; });
  if (has_piece()) {
    auto& kept = kept_[size_bytes];
    Piece piece = std::move(kept.back());
    kept.pop_back();
    return piece;
  }
  if (!has_room()) throw StateError("the other half of the swap failed before there was room");
  --wanted_[size_bytes];
  held_bytes_ += size_bytes;
  Piece piece;
  piece.charge = spare_.split(size_bytes);
  PhysicalMemory placeholder = std::move(placeholder_);
  lock.unlock();
  placeholder.release();
  piece.memory = PhysicalMemory::create_on_device(size_bytes, device_);
  return piece;
}

}  // namespace ebbtide
