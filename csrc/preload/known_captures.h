#pragma once

#include <cuda.h>

#include <mutex>
#include <vector>

namespace ebbtide::preload {

// The streams on which the program captures now. Each is counted by the core's capture gate.
class KnownCaptures {
 public:
  // Waits for the running operation. Several threads may use the same handle for their per-thread streams.
  void begin(CUstream stream);
  // Does nothing if no capture had begun on it. Runs the deferred frees.
  void end(CUstream stream) noexcept;
  // The same in two steps, for calls that may fail in between. Another thread may begin a capture on a forgotten stream
  // under the same handle. False: no capture had begun on it, and nothing needs to be done.
  bool forget(CUstream stream) noexcept;
  void put_back(CUstream stream) noexcept;  // undoes forget()
  void end_forgotten() noexcept;

 private:
  std::mutex mutex_;
  std::vector<CUstream> streams_;
};

// Leaked on purpose: captures may end after static destructors.
KnownCaptures& known_captures();

}  // namespace ebbtide::preload
