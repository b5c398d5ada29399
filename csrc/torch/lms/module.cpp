// `_lms`: saved tensors that leave the device, for ebbtide.lms only. Marshalling.
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "torch/lms/allocator_hooks.h"
#include "torch/lms/custom_functions.h"
#include "torch/lms/device_side.h"
#include "torch/lms/gradient_homes.h"
#include "torch/lms/ledger.h"
#include "torch/lms/module_calls.h"
#include "torch/lms/optimizer_states.h"
#include "torch/lms/packed.h"
#include "torch/lms/saved_hooks.h"
#include "torch/lms/weights.h"
#include "torch/lms/write_watch.h"

namespace py = pybind11;

namespace ebbtide::lms {
namespace {

py::object unpack(const Packed& packed) {
  at::Tensor tensor;
  try {
    const py::gil_scoped_release without_gil;  // a copy, and perhaps another thread's
    tensor = packed.unpack();
  } catch (const c10::OutOfMemoryError& error) {
    PyErr_SetString(py::module_::import("torch").attr("OutOfMemoryError").ptr(), error.what_without_backtrace());
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

py::dict statistics() {
  const Statistics found = Ledger::instance().statistics();
  py::dict result;
  result["evictions"] = found.evictions;
  result["reclaims"] = found.reclaims;
  result["evicted_bytes"] = found.evicted_bytes;
  result["loaded_bytes"] = found.loaded_bytes;
  result["host_bytes"] = found.host_bytes;
  result["waited_seconds"] = found.waited_seconds + found.stream_waited_seconds;
  result["hidden_seconds"] = found.hidden_seconds;
  result["prefetch_hits"] = found.prefetch_hits;
  result["prefetch_late"] = found.prefetch_late;
  result["plans_made"] = found.plans_made;
  result["margin_bytes"] = found.margin_bytes;
  return result;
}

// For a `with` around a step of an optimizer. Both ends are C, so that no interrupt comes between them and the block;
// where one comes before the block (Python 3.14), the destructor ends the step.
class Step {
 public:
  Step() = default;
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  ~Step() { leave(); }
  void enter() {
    OptimizerStates::instance().begin_step();
    Ledger::instance().note_update();
    thread_ = std::this_thread::get_id();
    Weights::instance().begin_use(this, UseKind::kStep, {});
  }
  void leave() noexcept {
    if (!thread_) return;
    Weights::instance().end_use(this, *thread_);
    OptimizerStates::instance().end_step(*thread_);
    thread_.reset();
  }

 private:
  std::optional<std::thread::id> thread_;
};

void add_states(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  const auto states = []() -> OptimizerStates& { return OptimizerStates::instance(); };
  py::class_<Step>(module, "Step")
      .def(py::init<>())
      .def("__enter__", &Step::enter, Released())
      .def("__exit__", [](Step& step, const py::args&) { step.leave(); });
  module.def("is_in_step", [=] { return states().is_in_step(); });
  module.def(
      "allow_state_moves", [=](bool are_allowed) { states().allow_moves(are_allowed); }, py::arg("are_allowed"),
      Released());
  module.def(
      "make_room_of_states", [=](uint64_t wanted_bytes) { return states().make_room(wanted_bytes); },
      py::arg("wanted_bytes"), "How many bytes left the device: more than wanted, or all that can.");
  module.def(
      "send_states_away", [=](uint64_t most_bytes) { return states().send_away(most_bytes); }, py::arg("most_bytes"),
      Released());
  module.def(
      "bring_states_back", [=](uint64_t most_bytes) { return states().bring_back(most_bytes); }, py::arg("most_bytes"),
      Released());
  module.def("state_host_bytes", &OptimizerStates::host_bytes);
  module.def(
      "planned_state_bytes",
      []() -> py::object {
        const auto planned = Ledger::instance().planned_state_bytes();
        return planned ? py::cast(*planned) : py::none();
      },
      "Of optimizer states, what plans have on the host; None: there is no plan.");
  module.def("forget_planned_states", [] { Ledger::instance().forget_planned_states(); });
  module.def("count_slow_read", [=] { states().count_slow_read(); });
  module.def("state_statistics", [=] {
    const StateStatistics found = states().statistics();
    py::dict result;
    result["state_evicted_bytes"] = found.evicted_bytes;
    result["state_loaded_bytes"] = found.loaded_bytes;
    result["slow_reads"] = found.slow_reads;
    result["short_bytes"] = found.short_bytes;
    result["step_short_bytes"] = found.step_short_bytes;
    return result;
  });
}

// For a `with` around the call of a module, as Step.
class ModuleUse {
 public:
  ModuleUse() = default;
  ModuleUse(const ModuleUse&) = delete;
  ModuleUse& operator=(const ModuleUse&) = delete;
  ~ModuleUse() { leave(); }
  // Of the parameters that may move, those that have not been adopted yet.
  py::list begin(const py::dict& parameters, bool brings) {
    std::vector<const void*> addresses;
    py::list others;
    for (const auto& [name, parameter] : parameters) {
      if (!THPVariable_Check(parameter.ptr())) continue;
      const at::Tensor& tensor = THPVariable_Unpack(parameter.ptr());
      if (!is_large(tensor)) continue;
      if (Weights::instance().is_weight(tensor.storage())) {
        addresses.push_back(tensor.storage().data());
      } else {
        others.append(parameter);
      }
    }
    thread_ = std::this_thread::get_id();
    const py::gil_scoped_release without_gil;
    Weights::instance().begin_use(this, UseKind::kModule, addresses, brings);
    return others;
  }
  void leave() noexcept {
    if (thread_) Weights::instance().end_use(this, *thread_);
    thread_.reset();
  }

 private:
  std::optional<std::thread::id> thread_;
};

bool is_on_host(const py::object& object) {
  if (!THPVariable_Check(object.ptr())) return false;
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  return is_large(tensor) && Weights::is_on_host(tensor.storage().data());
}

std::unique_ptr<GradientHomes::Departure> depart_gradient(uint64_t owner, const py::object& gradient) {
  const at::Tensor& tensor = THPVariable_Unpack(gradient.ptr());
  const py::gil_scoped_release without_gil;
  return GradientHomes::instance().depart(owner, tensor);
}

// Also of DistributedDataParallel and its like, which Python does not see.
bool has_accumulation_hooks(const py::object& parameter) {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(THPVariable_Unpack(parameter.ptr()));
  return node != nullptr && !node->post_hooks().empty();
}

void keep_gradient(uint64_t owner, const py::object& gradient) {
  const at::Tensor& tensor = THPVariable_Unpack(gradient.ptr());
  const py::gil_scoped_release without_gil;
  const void* const address = tensor.storage().data();
  GradientHomes::instance().keep(owner, tensor);
  Weights::instance().send_gradient_away(address);
}

void add_weights(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  const auto weights = []() -> Weights& { return Weights::instance(); };
  module.def(
      "may_be_weight",
      [](const py::object& object) {
        return THPVariable_Check(object.ptr()) && is_large(THPVariable_Unpack(object.ptr()));
      },
      py::arg("parameter"));
  module.def(
      "is_short", [=] { return weights().is_short(); },
      "Whether memory was so short that weights or gradients had to leave.");
  module.def("forget_weight_shortage", [=] { weights().forget_shortage(); });
  py::class_<ModuleUse>(module, "ModuleUse")
      .def(py::init<>())
      .def("__enter__", [](py::object use) { return use; })
      .def("begin", &ModuleUse::begin, py::arg("parameters"), py::arg("brings"))
      .def("__exit__", [](ModuleUse& use, const py::args&) { use.leave(); });
  module.def("is_on_host", &is_on_host, py::arg("parameter"), "Whether it is a weight that lies on the host.");
  module.def(
      "module_depth", [=] { return weights().module_depth(); }, "How many uses by modules are open in this thread.");
  module.def("begin_write_watch", &begin_write_watch);
  module.def("end_write_watch", &end_write_watch);
  module.def("take_written_weights", &take_written_weights,
             "Whether this thread has written a weight since its watch began, or since this was asked.");
  module.def(
      "allow_weight_moves", [=](bool are_allowed) { weights().allow_moves(are_allowed); }, py::arg("are_allowed"),
      Released());
  module.def(
      "make_room_of_weights",
      [=](int device, uint64_t wanted_bytes) { return weights().make_room(device, wanted_bytes); }, py::arg("device"),
      py::arg("wanted_bytes"), "How many bytes left the device: more than wanted, or all that can.");
  module.def(
      "bring_weights_back",
      [=](uint64_t most_bytes, bool with_gradients) { return weights().bring_back(most_bytes, with_gradients); },
      py::arg("most_bytes"), py::arg("with_gradients") = true, Released());
  module.def("weights_host_bytes", &Weights::weights_host_bytes, "Without gradients.");
  module.def(
      "have_weights_gone", [] { return GradientHomes::instance().has_dropped(); },
      "Whether weights have gone, or homes were given back to torch, since this was asked.");
  module.def("add_home_owner", [] { return GradientHomes::instance().add_owner(); });
  module.def(
      "remove_home_owner", [](uint64_t owner) { GradientHomes::instance().remove_owner(owner); }, py::arg("owner"));
  module.def(
      "allow_gradient_homes", [](bool are_kept) { GradientHomes::instance().allow(are_kept); }, py::arg("are_kept"),
      Released());
  using Departure = GradientHomes::Departure;
  py::class_<Departure>(module, "GradientDeparture")
      .def("arrive",
           [](Departure& departure) {
             at::Tensor gradient = departure.arrive();
             return gradient.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(gradient)))
                                       : py::object(py::none());
           })
      .def(
          "move_home",
          [](Departure& departure, const py::object& gradient) {
            departure.move_home(THPVariable_Unpack(gradient.ptr()));
          },
          py::arg("gradient"));
  module.def("depart_gradient", &depart_gradient, py::arg("owner"), py::arg("gradient"),
             "Begins the way to its home on the host. None: that is not free.");
  module.def("has_accumulation_hooks", &has_accumulation_hooks, py::arg("parameter"));
  module.def("keep_gradient", &keep_gradient, py::arg("owner"), py::arg("gradient"),
             "Makes a home on the host of its memory.");
  module.def("weight_statistics", [=] {
    const WeightStatistics found = weights().statistics();
    py::dict result;
    result["weight_evicted_bytes"] = found.evicted_bytes;
    result["weight_loaded_bytes"] = found.loaded_bytes;
    result["weight_host_bytes"] = Weights::host_bytes();
    result["slow_reads"] = found.slow_reads;
    return result;
  });
}

void set_rules(bool is_on, uint64_t min_bytes, bool evicts_at_once) {
  rules().min_bytes.store(min_bytes);
  rules().evicts_at_once.store(evicts_at_once);
  rules().is_on.store(is_on);
  const py::gil_scoped_release without_gil;  // waits for what is leaving
  Ledger::instance().allow_evictions(is_on);
}

}  // namespace
}  // namespace ebbtide::lms

PYBIND11_MODULE(_lms, module) {
  using namespace ebbtide::lms;
  py::class_<Packed>(module, "Packed");
  module.def("unpack", &unpack, py::arg("packed"));
  module.def(
      "follow_saved_tensors", [module] { return follow_saved_tensors(module.attr("unpack").ptr()); },
      "False if this process does not allow it.");
  module.def("read_saved_tensors", &read_saved_tensors, py::arg("getter"), py::arg("context"));
  module.def("run_backward", &run_backward);
  module.def("set_rules", &set_rules, py::arg("is_on"), py::arg("min_bytes"), py::arg("evicts_at_once"));
  module.def("statistics", &statistics);
  module.def(
      "owns_memory", [](const py::object& tensor) { return owns_memory(THPVariable_Unpack(tensor.ptr()).storage()); },
      py::arg("tensor"), "Whether its storage owns memory that LMS may move.");
  module.def("reset_statistics", [] {
    Ledger::instance().reset_statistics();
    OptimizerStates::instance().reset_statistics();
    Weights::instance().reset_statistics();
  });
  add_calls(module);
  add_states(module);
  add_weights(module);
  module.def(
      "evict",
      [](uint64_t wanted_bytes) {
        const py::gil_scoped_release without_gil;
        return Ledger::instance().evict(wanted_bytes);
      },
      py::arg("wanted_bytes"), "How many bytes left the device.");
  add_allocator_hooks(module);
}
