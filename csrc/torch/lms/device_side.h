// What depends on the kind of device: in which stream a thread works, how its work comes after a copy, and where memory
// comes from.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "torch/lms/tag_memory.h"
#include "torch/lms/transfer.h"

namespace ebbtide::lms {

// What finds no room on the device, though nothing can leave any more.
inline constexpr const char* kOverflowTags[] = {"lms.overflow"};  // python/ebbtide/lms/devices.py
inline constexpr TagMemory overflow_memory(kOverflowTags);

// When the device came to a place in its work.
class TimeMark {
 public:
  // Of the processor, whose work is the device's.
  explicit TimeMark(double seconds) : seconds_(seconds) {}
  // Of what is queued in the stream now. Throws what torch's events throw.
  explicit TimeMark(c10::Stream stream);
  // Waits until the device has come to it.
  void wait() const;
  // What is queued in the stream from now on comes after it. Throws what torch's events throw.
  void come_before(c10::Stream stream) const;
  // From the other one to this one. Both have been waited for.
  double seconds_since(const TimeMark& before) const;

 private:
  double seconds_ = 0;
  std::shared_ptr<c10::Event> event_;
};

class DeviceSide {
 public:
  struct Usage {
    uint64_t bytes = 0;    // what tensors have, wherever it lies, without what is cached
    uint64_t flushes = 0;  // how often an allocation had no room until all that is cached was given back
  };

  DeviceSide() = default;
  DeviceSide(const DeviceSide&) = delete;
  DeviceSide& operator=(const DeviceSide&) = delete;

  // On which the calling thread works.
  virtual c10::Device current_device() const = 0;
  // As ebbtide counts devices.
  virtual int number_of(c10::Device device) const = 0;
  // In which the calling thread queues its work.
  virtual c10::Stream current_stream(c10::Device device) const = 0;
  // For copies that run beside what threads queue.
  virtual c10::Stream copying_stream(c10::Device device) const = 0;
  // As a CUstream.
  virtual void* handle_of(c10::Stream stream) const = 0;
  // What this stream does from now on comes after the copy. Returns how long the thread waited, in seconds. Throws
  // std::runtime_error.
  virtual double come_after(OwnedCopy& copy, c10::Stream stream) const = 0;
  // In the calling thread's stream. host_seconds: now, on a clock that leaves out waits for copies.
  virtual TimeMark mark(c10::Device device, double host_seconds) const = 0;
  // Memory of LMS's own pool, in the order of the current stream. Throws c10::OutOfMemoryError.
  virtual c10::DataPtr allocate(c10::Device device, size_t size_bytes) const = 0;
  // False for ordinary memory, which CPU tensors get where LMS is off.
  virtual bool is_on_device(const void* address) const = 0;
  // The last reference goes. What is queued in the stream may still use the memory.
  virtual void let_go(c10::Storage storage, c10::Stream stream) const noexcept = 0;
  virtual Usage usage(c10::Device device) const = 0;
  uint64_t used_bytes(c10::Device device) const { return usage(device).bytes; }
  // Of memory in tags, what is not on the device. It counts in used_bytes.
  virtual uint64_t elsewhere_bytes(c10::Device device) const = 0;
  // What is on the device, with what is cached.
  virtual uint64_t held_bytes(c10::Device device) const = 0;
  // Whether free memory need not lie in one piece: it goes back to the driver in pages, and comes back in any order.
  virtual bool has_pages() const { return false; }
  // Gives back what is cached.
  virtual void release_cached(c10::Device device) const noexcept = 0;
  // The most that may be held.
  virtual uint64_t limit_bytes(c10::Device device) const = 0;
  // Memory of tags has moved between the device and the host: the limits follow. No lock is held.
  virtual void balance() const noexcept = 0;

 protected:
  ~DeviceSide() = default;  // those that there are live for ever
};

// What the module that serves CPU tensors offers. Plain functions, since it is another library.
struct SimulatedHooks {
  // Memory that belongs to LMS, or ordinary memory where LMS is off. Throws c10::OutOfMemoryError.
  void (*allocate)(size_t size_bytes, c10::DataPtr* data);
  uint64_t (*used_bytes)();
  void (*release_cached)();
};
void set_simulated_hooks(const SimulatedHooks& hooks);

DeviceSide& side_of(c10::Device device);
// On which the calling thread works.
c10::Device device_now();

}  // namespace ebbtide::lms
