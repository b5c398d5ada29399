#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "driver/stream.h"
#include "store/staging.h"

// What a copy needs and what takes long to make: a pinned ring, streams, events. Made once, and used for one copy at a time.
namespace ebbtide {

// What one thread of a copy needs: a stream, and an event for each piece that may be under way.
struct CopyLane {
  Stream stream;
  std::vector<Event> events;
};

// How a copy uses the ring: each of its threads has slots of its own.
struct RingCut {
  int threads = 1;
  size_t slot_bytes = 0;
  int slots_per_thread = 1;  // two or more, and bus and memory work at once
  size_t bytes_per_thread() const { return slot_bytes * static_cast<size_t>(slots_per_thread); }
};

class CopyEngine {
 public:
  // No lane yet. Throws DriverError.
  CopyEngine(int device, std::unique_ptr<Staging> staging);
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  int device() const { return device_; }
  int lane_count() const { return static_cast<int>(lanes_.size()); }
  // Makes what is missing, between copies; what was made stays. Throws DriverError.
  void make_lanes(int lane_count);
  CopyLane& lane(int index) { return lanes_[static_cast<size_t>(index)]; }
  // For kernels and fills beside the copies.
  const Stream& side_stream() const { return side_stream_; }
  const Staging& staging() const { return *staging_; }
  // A failed copy could not be waited for: the device may still use the ring, and what was copied. Nothing of it is ever used again.
  void poison() noexcept { staging_->poison(); }
  bool is_poisoned() const { return staging_->is_poisoned(); }

 private:
  const int device_;
  const std::unique_ptr<Staging> staging_;
  Stream side_stream_;
  std::deque<CopyLane> lanes_;
};

}  // namespace ebbtide
