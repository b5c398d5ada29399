// Devices' primary contexts, and which one each thread has made current.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>

#include "sim/lock.h"

namespace ebbtide::sim {

struct Context {
  int device = 0;
  uint64_t retain_count = 0;
  // An error that stays until the context goes: every later call that needs the context answers it.
  CUresult sticky_error = CUDA_SUCCESS;
};

class Contexts {
 public:
  // One handle per device for good, as in the real driver.
  static uint64_t id_of_device(int device) { return 0x1000 + 16 * static_cast<uint64_t>(device); }

  uint64_t retain(int device);
  // The context itself; nullptr for what never was one.
  Context* find(uint64_t id);
  bool is_active(uint64_t id) const;
  uint64_t total_retained() const;
  void reset();

  uint64_t generation() const { return generation_; }

 private:
  std::map<uint64_t, Context> contexts_;
  // Goes up at every reset, so that what other threads had made current is current no more.
  uint64_t generation_ = 1;
};

// The calling thread's context, or 0.
uint64_t current_context(Lock& lock);
// CUDA_SUCCESS when there is one that lives and is unharmed.
CUresult current_context_state(Lock& lock);
// The device of a context; that of the current one where `context` is 0.
int device_of_context(Lock& lock, uint64_t context);

}  // namespace ebbtide::sim
