#include "torch/lms/module_calls.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "policy/lms/mix.h"
#include "policy/lms/step_report.h"
#include "torch/lms/ledger.h"
#include "torch/lms/packed.h"
#include "torch/lms/weights.h"

namespace py = pybind11;

namespace ebbtide::lms {
namespace {

// Backward, and the second runs of checkpoints in it, are none of the calls that name what a step saves.
bool is_followed() {
  return at::GradMode::is_enabled() && torch::autograd::get_current_graph_task_id() == -1 &&
         !Ledger::instance().is_resting();
}

constexpr uint32_t kScope = 1, kUses = 2;
std::atomic<bool> follows_uses{false};

constexpr int kMostNesting = 4;  // of containers in arguments

void add_inputs(const py::handle& object, CallFrame& frame, int nesting) {
  if (THPVariable_Check(object.ptr())) {
    const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
    if (!is_large(tensor)) return;
    const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    if (std::find(frame.inputs.begin(), frame.inputs.end(), storage) != frame.inputs.end()) return;
    frame.inputs.push_back(storage);
    frame.input_bytes += tensor.storage().nbytes();
  } else if (nesting < kMostNesting && PyTuple_CheckExact(object.ptr())) {
    for (const py::handle each : py::reinterpret_borrow<py::tuple>(object)) add_inputs(each, frame, nesting + 1);
  } else if (nesting < kMostNesting && PyList_CheckExact(object.ptr())) {
    for (const py::handle each : py::reinterpret_borrow<py::list>(object)) add_inputs(each, frame, nesting + 1);
  } else if (nesting < kMostNesting && PyDict_CheckExact(object.ptr())) {
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(object)) add_inputs(value, frame, nesting + 1);
  }
}

// What is known of a module, guarded by the GIL. Classes are the first of them, for reports.
constexpr size_t kMostNames = size_t{1} << 20;
std::vector<const std::string*>& class_names() {
  static auto& names = *new std::vector<const std::string*>();
  return names;
}

struct KnownModule {
  uint64_t number = 0;  // which no other one gets when it is gone, as its address would be; from 1 on
  uint64_t kind = 0;    // of its class and its own parameters' sizes
  uint64_t name = 0;    // the same in each run of a program; 0 until its first call
  uint64_t siblings = 0, place = 0;
  uint64_t told = 0;  // what its parameters were when it last told which weights it uses
};

// By class and the module around: which places those that were called there, and live, have among themselves.
std::unordered_map<uint64_t, std::set<uint64_t>>& siblings() {
  static auto& places = *new std::unordered_map<uint64_t, std::set<uint64_t>>();
  return places;
}

// At its first call: by the module around it, its class, and its place there. That of a module that is gone is free
// again, so that a model that is made anew has the names of the one before.
void give_name(KnownModule& made, const std::string& class_name, const CallFrame* around) {
  made.name = around == nullptr ? 0 : around->name;
  for (const char letter : class_name) made.name = policy::mix(made.name + static_cast<unsigned char>(letter));
  made.siblings = policy::mix(made.name) + (around == nullptr ? 0 : around->module);
  std::set<uint64_t>& taken = siblings()[made.siblings];
  made.place = 1;
  for (const uint64_t place : taken) made.place += place == made.place ? 1 : 0;
  taken.insert(made.place);
  made.name = policy::mix(made.name + made.place);
}

void give_up_name(const KnownModule& gone) {
  const auto taken = siblings().find(gone.siblings);
  if (gone.name == 0 || taken == siblings().end()) return;
  taken->second.erase(gone.place);
  if (taken->second.empty()) siblings().erase(taken);
}

uint64_t kind_of(const py::handle& module) {
  uint64_t kind = policy::mix(reinterpret_cast<uintptr_t>(Py_TYPE(module.ptr())));
  const py::object parameters = py::getattr(module, "_parameters", py::none());
  if (!PyDict_Check(parameters.ptr())) return kind;
  for (const auto& [name, parameter] : py::reinterpret_borrow<py::dict>(parameters)) {
    kind = policy::mix(kind + 1);
    if (!THPVariable_Check(parameter.ptr())) continue;
    const at::Tensor& tensor = THPVariable_Unpack(parameter.ptr());
    if (tensor.is_nested() || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) continue;
    for (const int64_t size : tensor.sizes()) kind = policy::mix(kind + static_cast<uint64_t>(size));
  }
  return kind;
}

// Where its own parameters lie, under this limit; 0: it has none. What is compiled stands for all modules in it, and is
// only told apart by the limit.
uint64_t parameters_of(const py::handle& module) {
  static PyObject* const names[] = {PyUnicode_InternFromString("_compiled_call_impl"),
                                    PyUnicode_InternFromString("_modules"), PyUnicode_InternFromString("_orig_mod"),
                                    PyUnicode_InternFromString("_parameters")};
  const auto own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module.ptr(), nullptr));
  if (!own) throw py::error_already_set();
  const auto item = [](PyObject* dict, PyObject* name) {
    if (dict == nullptr || !PyDict_Check(dict)) return static_cast<PyObject*>(nullptr);
    PyObject* const found = PyDict_GetItemWithError(dict, name);
    if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return found;
  };
  const uint64_t limits = Weights::instance().limits();
  PyObject* const compiled = item(own.ptr(), names[0]);
  if ((compiled != nullptr && compiled != Py_None) || item(item(own.ptr(), names[1]), names[2]) != nullptr)
    return limits;
  PyObject* const parameters = item(own.ptr(), names[3]);
  if (parameters == nullptr || !PyDict_Check(parameters)) return 0;
  uint64_t found = 0;
  for (const auto& [name, parameter] : py::reinterpret_borrow<py::dict>(parameters)) {
    if (!THPVariable_Check(parameter.ptr())) continue;
    const c10::Storage& storage = THPVariable_Unpack(parameter.ptr()).unsafeGetTensorImpl()->unsafe_storage();
    if (storage && storage.device_type() == rules().device_type.load())
      found = policy::mix(found + limits + reinterpret_cast<uintptr_t>(storage.data())) | 1;
  }
  return found;
}

std::unordered_map<PyObject*, KnownModule>& known_modules() {
  static auto& modules = *new std::unordered_map<PyObject*, KnownModule>();
  return modules;
}

KnownModule& known(const py::handle& module) {
  auto& modules = known_modules();
  static auto& classes = *new std::unordered_set<std::string>();
  static uint64_t latest = 0;
  if (const auto found = modules.find(module.ptr()); found != modules.end()) return found->second;
  const uint64_t kind = kind_of(module);
  KnownModule& made = modules[module.ptr()] = {.number = ++latest, .kind = kind};
  if (latest <= kMostNames) class_names().push_back(&*classes.insert(Py_TYPE(module.ptr())->tp_name).first);
  const auto forget = [address = module.ptr()](py::handle reference) {
    give_up_name(known_modules().at(address));
    known_modules().erase(address);
    reference.dec_ref();
  };
  py::weakref(module, py::cpp_function(forget)).release();
  return made;
}

}  // namespace

std::vector<CallFrame>& open_calls() {
  static thread_local std::vector<CallFrame> frames;
  return frames;
}

CallScope::CallScope(const py::handle& module, const py::tuple& arguments, const py::dict& options, bool keeps) {
  if (!is_followed()) return;
  frame_.keeps = keeps;
  KnownModule& made = known(module);
  const auto& frames = open_calls();
  if (made.name == 0) give_name(made, Py_TYPE(module.ptr())->tp_name, frames.empty() ? nullptr : &frames.back());
  frame_.module = made.number;
  frame_.kind = made.kind;
  frame_.name = made.name;
  add_inputs(arguments, frame_, 0);
  add_inputs(options, frame_, 0);
}

uint32_t CallScope::enter() {
  if (!is_followed()) return Ledger::kToldNothing;
  auto& frames = open_calls();
  frames.push_back(std::move(frame_));
  depth_ = frames.size();
  thread_ = std::this_thread::get_id();
  return Ledger::instance().enter_call();
}

void CallScope::leave() noexcept {
  if (depth_ == 0 || thread_ != std::this_thread::get_id()) return;
  auto& frames = open_calls();
  if (frames.size() >= depth_) {
    frames.resize(depth_);  // calls inside it that an interrupt ended
    Ledger::instance().leave_call();
    frames.pop_back();
  }
  depth_ = 0;
}

namespace {

py::tuple as_tuple(const policy::Forecast& found) {
  return py::make_tuple(found.seconds, found.moved_bytes, found.recomputed_calls, found.state_bytes);
}

py::tuple to_python(const policy::StepReport& report) {
  py::list modules, without, with, choices;
  for (const auto& each : report.modules)
    modules.append(py::make_tuple(each.module, each.kept_bytes, each.evicted_bytes, each.recomputed_bytes));
  for (const auto& [seconds, bytes] : report.without) without.append(py::make_tuple(seconds, bytes));
  for (const auto& [seconds, bytes] : report.with) with.append(py::make_tuple(seconds, bytes));
  for (const auto& [forecast, measured_seconds, is_current] : report.choices)
    choices.append(py::make_tuple(as_tuple(forecast), measured_seconds, is_current));
  return py::make_tuple(report.limit_bytes, report.peak_bytes, modules, without, with, choices);
}

void add_reports(py::module_& module) {
  const auto ledger = []() -> Ledger& { return Ledger::instance(); };
  module.def(
      "step_report",
      [=]() -> py::object {
        const auto step = ledger().latest_step();
        if (!step) return py::none();
        return to_python(policy::report_on(step->first, step->second));
      },
      "Of the latest step: the limit of its plan, the bytes that it would need without one, (module, kept, evicted, "
      "recomputed bytes), (seconds, bytes in use) without the plan and with it, and of each choice (forecast, measured "
      "seconds, whether it is current). None: there was no step.");
  module.def(
      "step_forecast",
      [=](uint64_t limit_bytes) {
        const auto step = ledger().latest_step();
        return as_tuple(step ? policy::forecast_at(step->first, limit_bytes + step->second) : policy::Forecast());
      },
      py::arg("limit_bytes"),
      "Of the latest step under another limit: seconds, bytes moved to the host, calls recomputed, bytes of optimizer "
      "states on the host.");
  module.def(
      "recomputed_blocks",
      [=] {
        py::list found;
        for (const auto& block : ledger().recomputed_blocks())
          found.append(py::make_tuple(block.module, block.name, block.bytes, block.seconds));
        return found;
      },
      "What the latest step's choice recomputes: (module, name of the call, bytes that it drops, seconds).");
  module.def(
      "candidates",
      [=] {
        const std::vector<uint64_t> numbers = ledger().candidates();
        const std::unordered_set<uint64_t> wanted(numbers.begin(), numbers.end());
        py::list found;
        for (const auto& [living, made] : known_modules())
          if (wanted.contains(made.number)) found.append(py::reinterpret_borrow<py::object>(living));
        return found;
      },
      "Modules that choices for the latest step may recompute, in no order.");
}

}  // namespace

void add_calls(py::module_& module) {
  add_reports(module);
  const auto ledger = []() -> Ledger& { return Ledger::instance(); };
  py::class_<CallScope>(module, "CallScope")
      .def(py::init<const py::handle&, const py::tuple&, const py::dict&, bool>(), py::arg("module"),
           py::arg("arguments"), py::arg("options"), py::arg("keeps"))
      .def("__enter__", &CallScope::enter, "Flags: RECOMPUTE, NEW_CHOICE, GIVE_BACK.")
      .def("__exit__", [](CallScope& scope, const py::args&) { scope.leave(); });
  module.def(
      "wanted_of_call",
      [](const py::handle& called) {
        const uint32_t wanted = is_followed() ? kScope : 0;
        if (!follows_uses.load(std::memory_order_relaxed)) return wanted;
        if (Weights::instance().is_use_followed()) return wanted | kUses;
        const uint64_t parameters = parameters_of(called);
        return parameters != 0 && known(called).told != parameters ? wanted | kUses : wanted;
      },
      py::arg("module"),
      "Flags of a call that begins now in this thread. SCOPE: it is to have one. USES: it has to tell which weights it "
      "uses, as the outermost call does, the first one with these parameters, and all where weights had to leave.");
  module.attr("SCOPE") = kScope;
  module.attr("USES") = kUses;
  module.def(
      "follow_uses", [](bool are_followed) { follows_uses.store(are_followed); }, py::arg("are_followed"),
      "Whether there are weights that may move.");
  module.def(
      "note_told", [](const py::handle& called) { known(called).told = parameters_of(called); }, py::arg("module"),
      "It has told which weights it uses.");
  module.def(
      "module_number", [](const py::handle& made) { return known(made).number; }, py::arg("module"),
      "Which no other module gets when it is gone.");
  module.def(
      "module_class",
      [](uint64_t number) -> std::string {
        const auto& names = class_names();
        return number > 0 && number <= names.size() ? *names[number - 1] : "";
      },
      py::arg("number"), "The name of its class.");
  module.def(
      "forbid_recomputation",
      [=](uint64_t module_id, bool is_forbidden) { ledger().forbid_recomputation(module_id, is_forbidden); },
      py::arg("module"), py::arg("is_forbidden"));
  module.def(
      "keeps_graph", [] { return torch::autograd::get_current_graph_task_keep_graph(); },
      "Whether the backward that this thread runs keeps its graph for another one.");
  module.def(
      "set_rules",
      [=](bool may_recompute, bool may_evict, bool may_rest, bool are_new,
          const std::optional<std::pair<std::vector<uint64_t>, uint64_t>>& forced) {
        std::shared_ptr<const policy::ForcedChoice> choice;
        if (forced) {
          const auto& [names, state_bytes] = *forced;
          choice =
              std::make_shared<policy::ForcedChoice>(policy::ForcedChoice{{names.begin(), names.end()}, state_bytes});
        }
        ledger().set_rules(may_recompute, may_evict, may_rest, are_new, std::move(choice));
      },
      py::arg("may_recompute"), py::arg("may_evict"), py::arg("may_rest"), py::arg("are_new"), py::arg("forced"),
      "are_new: what is known of steps is forgotten. forced: the names of calls to recompute, and bytes of optimizer "
      "states to have on the host; None: the fastest.");
  module.attr("RECOMPUTE") = static_cast<uint32_t>(Ledger::kRecompute);
  module.attr("NEW_CHOICE") = static_cast<uint32_t>(Ledger::kNewChoice);
  module.attr("GIVE_BACK") = static_cast<uint32_t>(Ledger::kGiveBack);
  module.def(
      "assume_rate", [=](double bytes_per_second) { ledger().assume_rate(bytes_per_second); },
      py::arg("bytes_per_second"), "For tests.");
  module.def("choose_again", [=] { ledger().choose_again(); });
  module.def(
      "set_ranks", [=](bool has_ranks) { ledger().set_ranks(has_ranks); }, py::arg("has_ranks"),
      "Whether steps wait for those of other processes, whose choices may be others.");
  module.def("disturb_step", [=] { ledger().disturb_step(); }, "This step teaches nothing.");
}

}  // namespace ebbtide::lms
