#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

// Keeps synchronisations and stream captures apart (invariant 9): cuCtxSynchronize in any thread breaks a capture of
// any other.
namespace ebbtide {

class CaptureGate {
 public:
  // While a permit lives no capture that ebbtide knows of begins.
  class Permit {
   public:
    Permit(Permit&& other) noexcept : gate_(std::exchange(other.gate_, nullptr)) {}
    Permit& operator=(Permit&&) = delete;
    ~Permit();

   private:
    friend class CaptureGate;
    explicit Permit(CaptureGate* gate) : gate_(gate) {}
    CaptureGate* gate_;
  };

  // None while a capture runs or waits to begin. Never waits.
  std::optional<Permit> try_enter();
  // Waits until no permit is out.
  void begin_capture();
  void end_capture();  // throws StateError without a begin
  bool is_capturing() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int permits_ = 0;
  int captures_ = 0;
};

// Whether the calling thread, or a blocking stream of the device's context, captures. That is all that can be told
// without knowing the stream. stream: also asked, unless null.
bool is_capture_visible(int device, void* stream) noexcept;

}  // namespace ebbtide
