#pragma once

#include "base/owner.h"
#include "driver/driver.h"

namespace ebbtide {

// Streams and events hold no memory of the caller: one that can't be destroyed is reported and lost.
void report_if_lost(CUresult result) noexcept;

template <typename Handle, auto kDestroy>
struct QueueObject {
  Handle handle = nullptr;
  explicit operator bool() const { return handle != nullptr; }
  void undo() const noexcept { report_if_lost((driver_if_loaded()->*kDestroy)(handle)); }
};

class Event;

// Owns a non-blocking stream of the context that is current when it is made. Destroying it does not wait.
class Stream : public Owner<QueueObject<CUstream, &Driver::cuStreamDestroy>> {
 public:
  static Stream create();
  // Its kernels go before those of other streams, where the device has priorities.
  static Stream create_first();
  CUstream get() const { return object_.handle; }
  void synchronize() const { check(driver().cuStreamSynchronize(get()), "cuStreamSynchronize"); }
  // Whether all that was queued has been done.
  bool is_idle() const;
  // What is queued from now on begins after the event as it was recorded last.
  void wait_for(const Event& event) const;

 private:
  using Owner::Owner;
};

// Owns an event.
class Event : public Owner<QueueObject<CUevent, &Driver::cuEventDestroy>> {
 public:
  static Event create(unsigned flags = CU_EVENT_DISABLE_TIMING);  // without timing, which is faster
  static Event create_timed() { return create(CU_EVENT_DEFAULT); }
  CUevent get() const { return object_.handle; }
  void record(const Stream& stream) const { record(stream.get()); }
  void record(CUstream stream) const { check(driver().cuEventRecord(get(), stream), "cuEventRecord"); }
  void synchronize() const { check(driver().cuEventSynchronize(get()), "cuEventSynchronize"); }
  // Between the last records of two timed events that have been reached; 0 where the driver does not tell.
  double seconds_since(const Event& begin) const noexcept;

 private:
  using Owner::Owner;
};

}  // namespace ebbtide
