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

 private:
  bool forget(CUstream stream) noexcept;

  std::mutex mutex_;
  std::vector<CUstream> streams_;
};

// Leaked on purpose: captures may end after static destructors.
KnownCaptures& known_captures();

}  // namespace ebbtide::preload
