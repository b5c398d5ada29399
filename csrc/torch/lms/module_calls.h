// The calls of modules that a thread is in: they name what is saved in them, the same in each step.
#pragma once

#include <c10/core/Storage.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "policy/lms/step_record.h"

namespace ebbtide::lms {

struct CallFrame {
  uint64_t module = 0;
  uint64_t kind = 0;           // equal for modules that are built alike
  uint64_t name = 0;           // of the module, the same in each run of a program
  uint64_t key = 0;            // of the call, the same in each step
  bool keeps = false;          // no plan evicts what is saved in it
  uint64_t step = UINT64_MAX;  // in which index is valid, on this device
  c10::Device device = c10::DeviceType::CPU;
  uint32_t index = policy::kNone;
  uint64_t saves = 0;                           // in the call itself, since the last call inside it
  uint64_t calls = 0;                           // inside it
  std::vector<const c10::StorageImpl*> inputs;  // of its arguments, those that may leave
  uint64_t input_bytes = 0;
  std::vector<bool> are_saved;  // of the inputs, in this step
};

// Of this thread, from the outermost to the innermost.
std::vector<CallFrame>& open_calls();

// For a `with` around the call of a module. Both ends are C, so that no interrupt comes between them and the block.
class CallScope {
 public:
  // keeps: no plan evicts what is saved in the call.
  CallScope(const pybind11::handle& module, const pybind11::tuple& arguments, const pybind11::dict& options,
            bool keeps);
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;
  ~CallScope() { leave(); }
  // What Ledger::enter_call() tells.
  uint32_t enter();
  void leave() noexcept;

 private:
  CallFrame frame_;
  size_t depth_ = 0;  // of the frame; 0: not entered
  std::thread::id thread_;
};

// What Python calls of all this.
void add_calls(pybind11::module_& module);

}  // namespace ebbtide::lms
