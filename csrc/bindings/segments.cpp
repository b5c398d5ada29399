#include "bindings/segments.h"

#include <utility>

namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

int holds = 0;
PyObject* setter = nullptr;  // torch's; null: large model support does not want them

void set(const py::handle& with, bool is_on) { with(is_on ? "expandable_segments:True" : "expandable_segments:False"); }

void set(bool is_on) {
  if (setter != nullptr) set(py::reinterpret_borrow<py::object>(setter), is_on);
}

void expand_segments(const py::object& with) {
  const auto former = py::reinterpret_steal<py::object>(std::exchange(setter, nullptr));
  if (former && holds == 0) set(former, false);
  if (with.is_none()) return;
  setter = py::object(with).release().ptr();
  if (holds == 0) set(true);
}

}  // namespace

void hold_segments() {
  if (holds == 0) set(false);
  ++holds;
}

void release_segments() noexcept {
  if (holds == 0 || --holds > 0) return;
  try {
    set(true);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("torch's expandable segments");
  }
}

void forget_segment_holds() { holds = 0; }

void register_segments(py::module_& module) { module.def("expand_segments", &expand_segments, py::arg("setter")); }

}  // namespace ebbtide::bindings
