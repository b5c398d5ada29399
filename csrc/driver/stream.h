#pragma once

#include <utility>

#include "driver/driver.h"

namespace ebbtide {

class Event;

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
  // What is queued from now on begins after the event as it was recorded last. Needs cuStreamWaitEvent, which is
  // optional.
  void wait_for(const Event& event) const;

 private:
  explicit Stream(CUstream handle) : handle_(handle) {}
  CUstream handle_;
};

// Owns an event.
class Event {
 public:
  static Event create();  // without timing, which is faster
  static Event create_timed();
  Event(Event&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Event& operator=(Event&&) = delete;
  ~Event();
  CUevent get() const { return handle_; }
  void record(const Stream& stream) const { record(stream.get()); }
  void record(CUstream stream) const { check(driver().cuEventRecord(handle_, stream), "cuEventRecord"); }
  void synchronize() const { check(driver().cuEventSynchronize(handle_), "cuEventSynchronize"); }
  // Between the last records of two timed events that have been reached; 0 where the driver does not tell.
  double seconds_since(const Event& begin) const noexcept;

 private:
  explicit Event(CUevent handle) : handle_(handle) {}
  static Event create(unsigned flags);
  CUevent handle_;
};

}  // namespace ebbtide
