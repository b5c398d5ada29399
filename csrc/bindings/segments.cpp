#include "bindings/segments.h"

#include <memory>
#include <utility>

namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

int holds = 0;

// What torch is given to switch them on and off, with the program's other settings: torch forgets those that a call
// does not name.
struct Switch {
  py::object setter, on, off;
};
Switch* current = nullptr;  // null: large model support does not want them. Leaked at exit.

void set(const Switch& with, bool is_on) { with.setter(is_on ? with.on : with.off); }

void expand_segments(const py::object& setter, const py::object& on, const py::object& off) {
  const std::unique_ptr<Switch> former(std::exchange(current, nullptr));
  if (setter.is_none()) {
    if (former != nullptr && holds == 0) set(*former, false);
    return;
  }
  current = new Switch{setter, on, off};
  set(*current, holds == 0);
}

}  // namespace

void hold_segments() {
  if (holds == 0 && current != nullptr) set(Switch(*current), false);
  ++holds;
}

void release_segments() noexcept {
  if (holds == 0 || --holds > 0 || current == nullptr) return;
  try {
    set(Switch(*current), true);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("torch's expandable segments");
  }
}

void forget_segment_holds() { holds = 0; }

void register_segments(py::module_& module) {
  module.def("expand_segments", &expand_segments, py::arg("setter"), py::arg("on") = "", py::arg("off") = "");
}

}  // namespace ebbtide::bindings
