#include "torch/lms/allocator_hooks.h"

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
#include "torch/lms/overflow.h"
#include "torch/lms/packed.h"
#include "torch/lms/weights.h"

namespace py = pybind11;

namespace ebbtide::lms {
namespace {

// For the allocator of the simulated device (torch/cpu/reclaim.h), which has both as function pointers.
uint64_t reclaim(uint64_t wanted_bytes) {
  return Ledger::instance().reclaim(c10::Device(c10::DeviceType::CPU), wanted_bytes, /*is_first=*/false);
}

uint64_t reclaim_on_gpu(c10::Device device, uint64_t wanted_bytes, bool is_first) {
  return Ledger::instance().reclaim(device, wanted_bytes, is_first);
}

Ledger::Fit make_fit(c10::Device device, uint64_t wanted_bytes) noexcept {
  return Ledger::instance().make_fit(device, wanted_bytes);
}

// `CudaDevice.balance`, while a GPU's tensors are followed. It may be wanted in a thread that has an error set.
py::object& balance_function() {
  static py::object& function = *new py::object();
  return function;
}

bool balance() noexcept {
  if (Py_IsInitialized() == 0) return false;
  try {
    const py::gil_scoped_acquire gil;
    const py::error_scope kept;
    const py::object function = balance_function();
    if (!function) return false;
    try {
      return function().cast<bool>();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("ebbtide.lms");
    }
  } catch (const std::exception&) {
    // The limits stay as they were.
  }
  return false;
}

// Of optimizer states and weights that can't leave, which Python finds.
class OutsideText {
 public:
  void note(std::string text) {
    const std::lock_guard lock(mutex_);
    text_ = std::move(text);
  }
  std::string text() {
    const std::lock_guard lock(mutex_);
    return text_;
  }
  static OutsideText& instance() {
    static OutsideText& only = *new OutsideText();
    return only;
  }

 private:
  std::mutex mutex_;
  std::string text_;
};

// Why an allocation found no room; "" where LMS has nothing to say.
std::string explain() {
  std::string problem = Ledger::instance().problem();
  if (problem.empty()) problem = OptimizerStates::instance().problem();
  if (problem.empty()) problem = Weights::instance().problem();
  if (!problem.empty()) problem.insert(0, "saved tensors could not leave it: ");
  const std::string outside = OutsideText::instance().text();
  return problem + (problem.empty() || outside.empty() ? "" : "; ") + outside;
}

void explain_in(char* text, size_t capacity) {
  std::strncpy(text, explain().c_str(), capacity - 1);
  text[capacity - 1] = '\0';
}

void* overflow(c10::Device device, size_t size_bytes) { return Overflow::instance().take(device.index(), size_bytes); }
void* overflow_on_cpu(size_t size_bytes) { return Overflow::instance().take(0, size_bytes); }

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
      [](py::object function) {
        balance_function() = std::move(function);
        follow_cuda_allocations({&reclaim_on_gpu, &make_fit, &overflow, &balance, &explain});
        rules().device_type.store(c10::DeviceType::CUDA);
      },
      py::arg("balance"),
      "From now on tensors on GPUs are meant, for the rest of the process, and torch's allocator asks before it "
      "fails.");
  module.def("leave_cuda", [] {
    leave_cuda_allocations();
    balance_function() = py::object();
  });
  module.def("set_cuda_limit", &set_cuda_limit, py::arg("device"), py::arg("limit_bytes"));
  module.def("set_cuda_away", &set_cuda_away, py::arg("device"), py::arg("away_bytes"));
  module.def(
      "reclaim_functions",
      [] {
        return py::make_tuple(reinterpret_cast<uintptr_t>(&reclaim), reinterpret_cast<uintptr_t>(&explain_in),
                              reinterpret_cast<uintptr_t>(&overflow_on_cpu));
      },
      "For `_torch.set_reclaim`.");
  module.def(
      "note_outside", [](std::string text) { OutsideText::instance().note(std::move(text)); }, py::arg("text"),
      "A sentence on states and weights that can't leave, for errors; \"\": none.");
  module.def(
      "allow_overflow", [](bool is_allowed) { Overflow::instance().allow(is_allowed); }, py::arg("is_allowed"),
      "Whether what finds no room, though nothing can leave any more, may lie on the host.");
  module.def("overflow_bytes", [] { return Overflow::instance().taken_bytes(); }, "Taken since they were last reset.");
}

}  // namespace ebbtide::lms
