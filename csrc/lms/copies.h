#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/memory/capture_gate.h"
#include "driver/stream.h"
#include "lms/evicted_memory.h"

// Copies between a device and the host that run beside kernels: in streams of our own, which wait for the caller's
// streams, and which the caller's streams wait for (csrc/DESIGN.md, "How large model support copies").
namespace ebbtide::lms {

enum class CopyDirection { kToHost = 0, kToDevice = 1 };

// When a copy began and ended, and when a stream came to wait for it.
struct CopyEvents {
  Event begin;
  Event end;
  Event reached;
};

struct CopySeconds {
  double copying = 0;
  double waited = 0;  // by the first stream that was ordered after it
};

// One stream of copies: a device and a direction. Its functions need the device's context, which is current.
class CopyStream {
 public:
  CopyStream(int device, CopyDirection direction, EvictedMemory& memory);

  int device() const { return device_; }
  // Queues a copy behind what is queued in after_stream, and records its events. Throws DriverError, with nothing of it
  // under way unless is_poisoned(); StateError where that is so already.
  void queue(CUdeviceptr on_device, std::byte* on_host, size_t size_bytes, CUstream after_stream,
             const CopyEvents& events);
  // Waits for everything that is queued, where a copy can't be waited for alone. If even that fails, the stream is
  // poisoned: the copy may run for ever, so that its host memory is abandoned and no other begins. Throws DriverError.
  void settle(const void* on_host);
  bool is_poisoned() const { return is_poisoned_.load(); }

  // Events of earlier copies, or new ones. Throws DriverError.
  CopyEvents take_events();
  // Of a copy that is complete.
  void give_back(CopyEvents events) noexcept;

 private:
  const int device_;
  const CopyDirection direction_;
  EvictedMemory& memory_;
  const Stream stream_;
  const Event ready_;  // recorded in one stream after the other
  std::mutex order_;   // what belongs to one copy is queued without another copy in between
  std::atomic<bool> is_poisoned_{false};
  std::mutex events_mutex_;
  std::vector<CopyEvents> idle_events_;  // has room for all
  size_t made_events_ = 0;
};

// A copy that was queued. The calls on one copy are made one after another, except is_done().
class Copy {
 public:
  Copy(CopyStream& stream, CaptureGate& gate, const void* on_host)
      : stream_(stream), gate_(gate), on_host_(on_host), events_(stream.take_events()) {}
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;
  // After end(), or where the copy could not begin.
  ~Copy() = default;

  // Never waits, and breaks no capture. False if that can't be found out now.
  bool is_done() noexcept;
  // Throws DriverError; the copy may be waited for again.
  void wait();
  // What is queued in the stream from now on comes after the copy. Throws StateError, DriverError.
  void order_before(CUstream stream);
  // Waits and gives the events back. Throws DriverError if the copy may run for ever. Once.
  CopySeconds end();

 private:
  friend class Copies;
  CopyStream& stream_;
  CaptureGate& gate_;
  const void* const on_host_;
  CopyEvents events_;
  bool is_awaited_ = false;  // events_.reached is recorded
  std::atomic<bool> is_done_{false};
};

class Copies {
 public:
  Copies(CaptureGate& gate, EvictedMemory& memory) : gate_(gate), memory_(memory) {}

  // Throws StateError during a capture, InvalidArgument, DriverError.
  std::unique_ptr<Copy> begin(int device, void* destination, const void* source, size_t size_bytes,
                              CopyDirection direction, CUstream after_stream);

 private:
  CopyStream& stream_of(int device, CopyDirection direction);

  CaptureGate& gate_;
  EvictedMemory& memory_;
  std::mutex mutex_;
  std::map<std::pair<int, CopyDirection>, std::unique_ptr<CopyStream>> streams_;
};

// The process's one. Leaked on purpose, as its streams are.
Copies& copies();

}  // namespace ebbtide::lms
