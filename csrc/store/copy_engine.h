#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "driver/stream.h"
#include "store/host_memory.h"

// The parts of a copy that take long to make: a pinned ring, streams and events. Made once, and used by one copy at
// a time.
namespace ebbtide {

class CopyEngine {
 public:
  // Throws DriverError.
  CopyEngine(int device, std::unique_ptr<HostMemory> staging);
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;

  int device() const { return device_; }
  // The stream of all copies over the bus: the engine idles least between two copies of one stream.
  const Stream& stream() const { return stream_; }
  // One event for each piece that may be under way.
  const Event& landing(size_t index) const { return landings_[index]; }
  size_t landing_count() const { return landings_.size(); }
  // For kernels and fills beside the copies.
  const Stream& side_stream() const { return side_stream_; }
  const HostMemory& staging() const { return *staging_; }
  // Waits for a stream that uses its ring, one of its own or the caller's. False if a second try failed, too: the
  // device may still use the ring and the copied memory, and neither is used again.
  bool settle(const Stream& stream) noexcept;
  void poison() noexcept { staging_->abandon(); }
  bool is_poisoned() const { return staging_->is_abandoned(); }

 private:
  const int device_;
  const std::unique_ptr<HostMemory> staging_;
  Stream stream_;
  Stream side_stream_;
  std::vector<Event> landings_;
};

}  // namespace ebbtide
