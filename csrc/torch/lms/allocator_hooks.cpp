#include "torch/lms/allocator_hooks.h"

#include <torch/csrc/autograd/python_variable.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

#include "torch/lms/cuda_side.h"
#include "torch/lms/device_side.h"
#include "torch/lms/ledger.h"
#include "torch/lms/optimizer_states.h"
#include "torch/lms/packed.h"
#include "torch/lms/weights.h"

namespace py = pybind11;

namespace ebbtide::lms {
namespace {

// For the allocator of the simulated device (torch/cpu/reclaim.h), which has these as function pointers.
uint64_t reclaim(uint64_t wanted_bytes) {
  return Ledger::instance().reclaim(c10::Device(c10::DeviceType::CPU), wanted_bytes, /*is_first=*/false);
}

void took(size_t size_bytes) { Ledger::instance().note_taken(c10::Device(c10::DeviceType::CPU), size_bytes); }

uint64_t reclaim_on_gpu(c10::Device device, uint64_t wanted_bytes, bool is_first) {
  return Ledger::instance().reclaim(device, wanted_bytes, is_first);
}

// `CudaDevice.balance` and `give_back`, while a GPU's tensors are followed. They may be wanted in a thread that has an
// error set.
py::object& balance_function() {
  static py::object& function = *new py::object();
  return function;
}
py::object& give_back_function() {
  static py::object& function = *new py::object();
  return function;
}

// Of a hook, which must not fail. An interrupt that came in it comes again afterwards.
void discard(py::error_already_set& error) {
  if (error.matches(PyExc_KeyboardInterrupt)) {
    PyErr_SetInterrupt();
  } else {
    error.discard_as_unraisable("ebbtide.lms");
  }
}

bool call(const py::object& (*find)()) noexcept {
  if (Py_IsInitialized() == 0) return false;
  try {
    const py::gil_scoped_acquire gil;
    const py::error_scope kept;
    const py::object function = find();
    if (!function) return false;
    try {
      return function().cast<bool>();
    } catch (py::error_already_set& error) {
      discard(error);
    }
  } catch (const std::exception&) {
    // The limits stay as they were.
  }
  return false;
}

bool balance() noexcept {
  return call([]() -> const py::object& { return balance_function(); });
}

bool give_back() noexcept {
  return call([]() -> const py::object& { return give_back_function(); });
}

// What Python has found out, for errors.
class Text {
 public:
  void note(std::string text) {
    const std::lock_guard lock(mutex_);
    text_ = std::move(text);
  }
  std::string text() {
    const std::lock_guard lock(mutex_);
    return text_;
  }

 private:
  std::mutex mutex_;
  std::string text_;
};

// Of optimizer states and weights that can't leave.
Text& outside_text() {
  static Text& text = *new Text();
  return text;
}

// Why the last resort had no memory.
Text& overflow_text() {
  static Text& text = *new Text();
  return text;
}

// Why an allocation found no room; "" where LMS has nothing to say.
std::string explain() {
  std::string problem = Ledger::instance().problem();
  if (problem.empty()) problem = OptimizerStates::instance().problem();
  if (problem.empty()) problem = Weights::instance().problem();
  if (!problem.empty()) problem.insert(0, "saved tensors could not leave it: ");
  for (const std::string& text : {outside_text().text(), overflow_text().text()})
    problem += (problem.empty() || text.empty() ? "" : "; ") + text;
  return problem;
}

void explain_in(char* text, size_t capacity) {
  std::strncpy(text, explain().c_str(), capacity - 1);
  text[capacity - 1] = '\0';
}

// `devices.take_overflow`, while the program allows it.
py::object& overflow_function() {
  static py::object& function = *new py::object();
  return function;
}

// Whether there is one: where there is none, an allocation that fails does not wait for the GIL.
std::atomic<bool> may_overflow{false};

// Whether the thread is in it already: what that allocates finds no room either.
thread_local bool is_overflowing = false;

// What LMS allocates to be faster is not worth memory on the host.
thread_local bool may_overflow_here = true;

// The tensor's memory, without the tensor. No error leaves: the allocation that asked has one.
bool overflow(size_t size_bytes, c10::DataPtr* data) {
  if (!may_overflow.load() || is_overflowing || !may_overflow_here || Ledger::is_prefetching() ||
      Py_IsInitialized() == 0)
    return false;
  try {
    const py::gil_scoped_acquire gil;
    const py::error_scope kept;
    const py::object function = overflow_function();
    if (!function || function.is_none()) return false;  // since the look at may_overflow
    is_overflowing = true;
    py::object found;
    try {
      found = function(size_bytes);
    } catch (py::error_already_set& error) {
      discard(error);
    }
    is_overflowing = false;
    if (!found || !THPVariable_Check(found.ptr())) return false;
    const c10::Storage storage = THPVariable_Unpack(found.ptr()).storage();
    *data = storage.set_data_ptr(c10::DataPtr(nullptr, storage.device()));
    return true;
  } catch (const std::exception&) {
    is_overflowing = false;
    return false;
  }
}

}  // namespace

void add_allocator_hooks(py::module_& module) {
  module.def(
      "set_hooks",
      [](uintptr_t allocate, uintptr_t used_bytes, uintptr_t release_cached) {
        set_simulated_hooks({reinterpret_cast<void (*)(size_t, c10::DataPtr*)>(allocate),
                             reinterpret_cast<uint64_t (*)()>(used_bytes),
                             reinterpret_cast<void (*)()>(release_cached)});
      },
      py::arg("allocate"), py::arg("used_bytes"), py::arg("release_cached"),
      "The addresses that `_torch.lms_functions` returns.");
  module.def(
      "follow_cuda",
      [](py::object balance_with, py::object give_back_with) {
        balance_function() = std::move(balance_with);
        give_back_function() = std::move(give_back_with);
        follow_cuda_allocations({&reclaim_on_gpu, &overflow, &balance, &give_back, &explain});
        rules().device_type.store(c10::DeviceType::CUDA);
      },
      py::arg("balance"), py::arg("give_back"),
      "From now on tensors on GPUs are meant, for the rest of the process, and torch's allocator asks before it "
      "fails.");
  module.def("leave_cuda", [] {
    leave_cuda_allocations();
    balance_function() = py::object();
    give_back_function() = py::object();
  });
  module.def("set_cuda_limit", &set_cuda_limit, py::arg("device"), py::arg("limit_bytes"));
  module.def(
      "set_cuda_away",
      [](int device, uint64_t away_bytes, uint64_t unused_bytes, int watch) {
        set_cuda_away(device, away_bytes, unused_bytes, static_cast<Watch>(watch));
      },
      py::arg("device"), py::arg("away_bytes"), py::arg("unused_bytes"), py::arg("watch"));
  module.def(
      "reclaim_functions",
      [] {
        return py::make_tuple(reinterpret_cast<uintptr_t>(&reclaim), reinterpret_cast<uintptr_t>(&explain_in),
                              reinterpret_cast<uintptr_t>(&overflow), reinterpret_cast<uintptr_t>(&took));
      },
      "For `_torch.set_reclaimer`.");
  module.def(
      "note_outside", [](std::string text) { outside_text().note(std::move(text)); }, py::arg("text"),
      "A sentence on states and weights that can't leave, for errors; \"\": none.");
  module.def(
      "note_overflow", [](std::string text) { overflow_text().note(std::move(text)); }, py::arg("text"),
      "A sentence on why the last resort had no memory, for errors; \"\": it had.");
  module.def(
      "without_overflow",
      [](const py::function& make) {
        struct Without {
          Without() { may_overflow_here = false; }
          Without(const Without&) = delete;
          Without& operator=(const Without&) = delete;
          ~Without() { may_overflow_here = true; }
        };
        const Without without;
        return make();
      },
      py::arg("make"), "Calls it. What it allocates and finds no room is an error.");
  module.def(
      "set_overflow",
      [](py::object function) {
        may_overflow.store(!function.is_none());
        overflow_function() = std::move(function);
      },
      py::arg("function"),
      "Of a size, a tensor of so many bytes, whose memory an allocation takes that finds no room though nothing can "
      "leave any more, or None. None: no such function.");
}

}  // namespace ebbtide::lms
