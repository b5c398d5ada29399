#pragma once

#include <memory>
#include <vector>

#include "driver/stream.h"
#include "store/staging.h"

// What a copy needs and what takes long to make: a pinned ring, streams, events. Made once, and used for one copy at a time.
namespace ebbtide {

// A stream, the slots that staged pieces go through, and an event for each piece that may be under way.
struct CopyLane {
  Stream stream;
  std::vector<std::byte*> slots;
  std::vector<Event>
      events;  // more than slots: pieces that the copy engine takes from the store by itself need no slot
};

class CopyEngine {
 public:
  // As many lanes as there are slots for, at most lane_count; each has the same number of slots (two or more, so that bus and memory work at once, where there are enough).
  // Throws DriverError.
  CopyEngine(int device, std::unique_ptr<Staging> staging, int lane_count);
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  int device() const { return device_; }
  int lane_count() const { return static_cast<int>(lanes_.size()); }
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
  std::vector<CopyLane> lanes_;
};

}  // namespace ebbtide
