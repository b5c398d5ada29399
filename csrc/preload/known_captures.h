#pragma once

#include <cuda.h>

#include <mutex>
#include <vector>

namespace ebbtide::preload {

// The streams on which the program captures now, each begun at the core's gate.
class KnownCaptures {
 public:
  // Waits for what a capture must not meet. Several threads may name their per-thread stream alike.
  void begin(CUstream stream);
  // Nothing where none was begun on it. Frees what was put off.
  void end(CUstream stream) noexcept;
  // The same in two steps, for calls that may fail in between. Another thread may begin a capture on a forgotten stream
  // under the same handle. False: no capture had begun on it, and nothing needs to be done.
  bool forget(CUstream stream) noexcept;
  void put_back(CUstream stream) noexcept;  // in the place that forget left
  void end_forgotten() noexcept;

 private:
  std::mutex mutex_;
  std::vector<CUstream> streams_;
};

// Leaked on purpose: captures may end after static destructors.
KnownCaptures& known_captures();

}  // namespace ebbtide::preload
