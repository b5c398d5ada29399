// The primary contexts of the devices, the contexts that programs make, and each thread's stack of current contexts.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>

#include "sim/lock.h"

namespace ebbtide::sim {

struct Context {
  int device = 0;
  uint64_t retain_count = 0;
  // An error that stays until the context ends: every later call that needs the context returns it.
  CUresult sticky_error = CUDA_SUCCESS;
};

class Contexts {
 public:
  // Each device has one handle for the life of the process, as in the real driver.
  static uint64_t id_of_device(int device) { return 0x1000 + 16 * static_cast<uint64_t>(device); }

  uint64_t retain(int device);
  // A context of the caller's own, with one holder.
  uint64_t make(int device, uint64_t id);
  // The context with this id, or nullptr if there never was one.
  Context* find(uint64_t id);
  bool is_active(uint64_t id) const;
  uint64_t total_retained() const;
  void reset();

  uint64_t generation() const { return generation_; }

 private:
  std::map<uint64_t, Context> contexts_;
  // Incremented at every reset, so that contexts which other threads had made current are no longer current.
  uint64_t generation_ = 1;
};

// Gives up everything that belongs to a context, and its last holder. Releases the lock for a while.
void end_context(Lock& lock, uint64_t context);

// The calling thread's context, or 0.
uint64_t current_context(Lock& lock);
// Replaces the calling thread's context, or with 0 takes it off the thread's stack.
void set_current_context(Lock& lock, uint64_t context);
// False if the stack is full.
bool push_context(Lock& lock, uint64_t context);
// CUDA_SUCCESS if the calling thread has a current context that is alive and has no sticky error.
CUresult current_context_state(Lock& lock);
// The device of `context`, or of the current context if `context` is 0.
int device_of_context(Lock& lock, uint64_t context);

}  // namespace ebbtide::sim
