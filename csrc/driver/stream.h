#pragma once

#include <utility>

#include "driver/driver.h"

namespace ebbtide {

// Owns a non-blocking stream of the context that is current when it is made. Destroying it does not wait.
class Stream {
 public:
  static Stream create();
  // Its kernels go before those of other streams, where the driver has priorities.
  static Stream create_first();
  Stream(Stream&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Stream& operator=(Stream&&) = delete;
  ~Stream();
  CUstream get() const { return handle_; }
  void synchronize() const { check(driver().cuStreamSynchronize(handle_), "cuStreamSynchronize"); }

 private:
  explicit Stream(CUstream handle) : handle_(handle) {}
  CUstream handle_;
};

// Owns an event without timing.
class Event {
 public:
  static Event create();
  Event(Event&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Event& operator=(Event&&) = delete;
  ~Event();
  void record(const Stream& stream) const { check(driver().cuEventRecord(handle_, stream.get()), "cuEventRecord"); }
  void synchronize() const { check(driver().cuEventSynchronize(handle_), "cuEventSynchronize"); }

 private:
  explicit Event(CUevent handle) : handle_(handle) {}
  CUevent handle_;
};

}  // namespace ebbtide
