#include <pthread.h>
#include <pybind11/stl.h>

#include "bindings/frames.h"

// Frames for Python.
namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

// Several calls of built-in functions, up to the first that fails. No interrupt can come between them.
void call_together(const py::args& calls) {
  for (const py::handle entry : calls) {
    const auto pair = py::cast<py::tuple>(entry);
    const auto result = py::reinterpret_steal<py::object>(PyObject_CallObject(pair[0].ptr(), pair[1].ptr()));
    if (!result) throw py::error_already_set();
  }
}

// Removes the first (function, argument) from the list and calls it, in one step. So each is called once, even if the
// caller is interrupted.
void call_next(const py::list& calls) {
  const auto next = py::cast<py::tuple>(calls[0]);
  if (PySequence_DelItem(calls.ptr(), 0) != 0) throw py::error_already_set();
  const auto result =
      py::reinterpret_steal<py::object>(PyObject_CallFunctionObjArgs(next[0].ptr(), next[1].ptr(), nullptr));
  if (!result) throw py::error_already_set();
}

void close_frame(const FramePointer& frame) {
  const auto stack = frame->stack.lock();
  if (stack != nullptr && frame->is_closed) return;
  if (stack != nullptr) return stack->close(frame);
  FirstError error;
  frame->close(error);
  error.raise_if_any();
}

}  // namespace

void register_frames(py::module_& module) {
  pthread_atfork(nullptr, nullptr, &Holding::forget_parent);
  py::class_<HeldLease, std::shared_ptr<HeldLease>>(module, "HeldLease")
      .def_readonly("id", &HeldLease::id)
      .def_readonly("epoch", &HeldLease::epoch)
      .def_readonly("is_away", &HeldLease::is_away)
      .def_readonly("is_open", &HeldLease::is_open);
  py::class_<Holding, std::shared_ptr<Holding>>(module, "Holding")
      .def(py::init<>())
      .def("open_lease", &Holding::open_lease, py::arg("tag"), py::arg("holder"))
      .def("withhold", &Holding::withhold)
      .def("begin_capture", &Holding::begin_capture)
      .def("close", &Holding::end_all)
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__", [](Holding& self, const py::args&) { self.end_all(); });
  py::class_<Frame, Holding, std::shared_ptr<Frame>>(module, "Frame")
      .def(py::init<>())
      .def_readwrite("after", &Frame::after)
      .def_readwrite("task", &Frame::task)
      .def_readwrite("takes_all_threads", &Frame::takes_all_threads)
      .def_readwrite("hides_outer", &Frame::hides_outer)
      .def_readwrite("beats_all", &Frame::beats_all)
      .def_readwrite("refusal_beside", &Frame::refusal_beside)
      .def_readonly("is_closed", &Frame::is_closed)
      .def_property_readonly("is_active", &Frame::is_active)
      .def("add_use", &Frame::add_use, py::arg("enter"), py::arg("arguments"), py::arg("leave"),
           py::arg("leaves_by_token") = false)
      .def("tag_thread", &Frame::tag_thread, py::arg("tag"), py::arg("backup"), py::arg("retain"))
      .def("leave_thread_untagged", [](Frame& self) { self.policy.tagging = EBBTIDE_TAGGING_OFF; })
      .def("push", [](const FramePointer& self) { FrameStack::mine().push(self); })
      .def("activate", [](Frame& self) { self.activate(); })
      .def("close", &close_frame);
  module.def("others_in_regions", &FrameStack::others_in_regions);
  module.def("reenter", [] { FrameStack::mine().reenter(); });
  module.def("capture_count", &Holding::capture_count);
  module.def("call_together", &call_together);
  module.def("call_next", &call_next, py::arg("calls"));
}

}  // namespace ebbtide::bindings
