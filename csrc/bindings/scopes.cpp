// `with` blocks that an interrupt cannot leave half entered or half exited: csrc/DESIGN.md, How a `with` survives an
// interrupt.
#include <pthread.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>

#include "bindings/frames.h"

namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

constexpr int kMostInterrupts = 100;  // of one `_close`, which is then given up

// --- what both kinds of `with` share ---

// The exit that was looked up last, by the `with` that is about to enter. Leaked on purpose.
template <typename Exit>
std::weak_ptr<Exit>& newest_exit() {
  static auto* const newest = new std::weak_ptr<Exit>;
  return *newest;
}

// Of the `with` that enters this now: it was looked up just before. By hand there may be none, or one of another.
template <typename Exit>
std::shared_ptr<Exit> take_exit(const py::object& owner) {
  std::shared_ptr<Exit> exit = std::exchange(newest_exit<Exit>(), {}).lock();
  return exit != nullptr && exit->owner.is(owner) ? exit : nullptr;
}

// `__exit__` of the class: each look-up on an instance gives an Exit. ExitStack calls it unbound.
template <typename Exit>
struct ExitOfClass {};

template <typename Exit>
py::object get_exit(const py::object& self, const py::object& owner, const py::object&) {
  if (owner.is_none()) return self;
  const auto exit = std::make_shared<Exit>(owner);
  newest_exit<Exit>() = exit;
  return py::cast(exit);
}

template <typename Exit>
void register_exit(py::module_& module, const std::string& name, void (*call)(Exit&, const py::args&),
                   void (*call_unbound)(const py::object&, const py::args&)) {
  py::class_<Exit, std::shared_ptr<Exit>>(module, name.c_str()).def("__call__", call);
  py::class_<ExitOfClass<Exit>>(module, (name + "OfClass").c_str())
      .def("__get__", &get_exit<Exit>)
      .def("__call__", [call_unbound](const ExitOfClass<Exit>&, const py::object& owner, const py::args& exception) {
        call_unbound(owner, exception);
      });
}

// --- AllocationScope ---

// The call at the end of a `with` over an AllocationScope.
struct Exit {
  explicit Exit(py::object of) : owner(std::move(of)) {}
  Exit(const Exit&) = delete;
  Exit& operator=(const Exit&) = delete;
  ~Exit();
  const py::object owner;
  FramePointer frame;  // of the `with`; a closed one if it had nothing to open
};

// exception: the arguments of `__exit__`.
bool ends_generator(const py::args& exception) {
  return !exception.empty() && exception[0].ptr() == PyExc_GeneratorExit;
}

// A scope that was entered inside it is still open, and took the allocations since then.
void warn_of_inner(const Frame& frame, const Frame& inner) {
  const std::string message =
      frame.name() + " ends before " + inner.name() +
      ", which was entered inside it: a generator or a task waits in there, and this thread's allocations meanwhile "
      "belong to the latter. Don't yield or await inside a region";
  if (PyErr_WarnEx(PyExc_RuntimeWarning, message.c_str(), 1) != 0) throw py::error_already_set();
}

// is_quiet: at the end of a generator, which may come at any time and in any thread.
void leave(const FramePointer& frame, bool is_quiet) {
  const auto stack = frame->stack.lock();
  // The thread that entered it has ended, or is a parent's.
  if (stack == nullptr || frame->is_closed() || !stack->is_of_this_process()) return;
  const bool is_mine = stack->is_mine();
  const FramePointer inner = is_mine ? stack->inside(frame) : nullptr;
  stack->close(frame);
  if (!is_mine && !is_quiet) {
    raise_state_error(
        "another thread entered this: it is left now, and that thread has not been inside since; leave it in the "
        "thread that entered it");
  }
  if (!frame->after.is_none()) frame->after();
  if (inner != nullptr && !is_quiet) warn_of_inner(*frame, *inner);
}

// By hand: the innermost frame of this thread that owner has opened.
void leave_newest(const py::object& owner, const py::args& exception) {
  const FramePointer frame = FrameStack::mine().find(owner);
  if (frame != nullptr) return leave(frame, ends_generator(exception));
  owner.attr("_refuse_exit")(FrameStack::is_open_elsewhere(owner));
}

Exit::~Exit() {
  FirstError error;
  if (frame != nullptr) error.attempt([&] { leave(frame, true); });
  error.report("the end of a region");
}

void call_exit(Exit& self, const py::args& exception) {
  const FramePointer frame = std::exchange(self.frame, nullptr);
  if (frame != nullptr) return leave(frame, ends_generator(exception));
  leave_newest(self.owner, exception);
}

py::object enter_allocation_scope(const py::object& self) {
  const std::shared_ptr<Exit> exit = take_exit<Exit>(self);
  const auto frame = std::make_shared<Frame>();
  frame->owner = self;
  FirstError error;
  bool is_prepared = false;
  error.attempt([&] { is_prepared = !self.attr("_prepare")(frame).is(py::bool_(false)); });
  // From here on nothing of Python runs.
  if (is_prepared) {
    FrameStack::mine().push(frame);
  } else {
    frame->close(error);  // the traceback may keep the frame alive
    error.raise_if_any();
  }
  if (exit != nullptr && exit->frame == nullptr) exit->frame = frame;
  return self;
}

// --- Scope ---

void close_scope(const py::object& self, const py::object& failure) {
  self.attr("_is_open") = false;
  self.attr("_failure") = failure;
  FirstError interrupt;
  py::object own = py::none();
  for (int count = 0; count < kMostInterrupts; ++count)
    if (interrupt.attempt([&] { own = self.attr("_close")(); })) break;
  self.attr("_failure") = py::none();
  try {
    interrupt.raise_if_any();
  } catch (const py::error_already_set& error) {
    if (!own.is_none()) PyException_SetContext(error.value().ptr(), own.release().ptr());
    throw;
  }
  if (!own.is_none()) raise(own);
}

// What the end of a generator gives: the block was not completed, or in Python 3.14 may not have begun.
void drop_scope(const py::object& self) {
  if (self.attr("_is_open").cast<bool>()) close_scope(self, py::handle(PyExc_GeneratorExit)());
}

// The call at the end of a `with` over a Scope.
struct ScopeExit {
  explicit ScopeExit(py::object of) : owner(std::move(of)) {}
  ScopeExit(const ScopeExit&) = delete;
  ScopeExit& operator=(const ScopeExit&) = delete;
  ~ScopeExit() {
    FirstError error;
    if (has_entered) error.attempt([&] { drop_scope(owner); });
    error.report("the end of a scope");
  }
  const py::object owner;
  bool has_entered = false;  // by the `with` that looked this up
};

py::object enter_scope(const py::object& self) {
  const std::shared_ptr<ScopeExit> exit = take_exit<ScopeExit>(self);
  if (!self.attr("_is_open").is_none()) raise_state_error("this can be entered once: make another one");
  self.attr("_is_open") = true;
  try {
    py::object result = self.attr("_open")();
    if (exit != nullptr) exit->has_entered = true;
    return result;
  } catch (const py::error_already_set& error) {
    const py::object first = error.value();
    try {
      close_scope(self, first);
    } catch (const py::error_already_set& second) {
      if (!second.value().is(first)) PyException_SetContext(second.value().ptr(), py::object(first).release().ptr());
      throw;
    }
    throw;
  }
}

void exit_scope(const py::object& self, const py::args& exception) {
  if (!self.attr("_is_open").cast<bool>()) raise_state_error("this is not open: it was left already, or never entered");
  close_scope(self, exception.size() > 1 ? py::object(exception[1]) : py::none());
}

void call_scope_exit(ScopeExit& self, const py::args& exception) {
  self.has_entered = false;
  exit_scope(self.owner, exception);
}

// --- for Python ---

// Several calls of built-in functions, up to the first that fails. No interrupt can come between them.
void call_together(const py::args& calls) {
  for (const py::handle entry : calls) {
    const auto [function, arguments] = py::cast<std::pair<py::object, py::tuple>>(entry);
    function(*arguments);
  }
}

// Removes the first (function, argument) from the list and calls it, in one step. So each is called once, even if the
// caller is interrupted.
void call_next(const py::list& calls) {
  const auto [function, argument] = py::cast<std::pair<py::object, py::object>>(calls[0]);
  if (PySequence_DelItem(calls.ptr(), 0) != 0) throw py::error_already_set();
  function(argument);
}

void register_frame(py::module_& module) {
  py::class_<HeldLease, std::shared_ptr<HeldLease>>(module, "HeldLease")
      .def_readonly("id", &HeldLease::id)
      .def_readonly("epoch", &HeldLease::epoch)
      .def_readonly("is_away", &HeldLease::is_away)
      .def_readonly("is_open", &HeldLease::is_open);
  py::class_<Frame, FramePointer>(module, "Frame")
      .def(py::init<>())
      .def_readwrite("after", &Frame::after)
      .def_readwrite("task", &Frame::task)
      .def_readwrite("takes_all_threads", &Frame::takes_all_threads)
      .def_readwrite("hides_outer", &Frame::hides_outer)
      .def_readwrite("beats_all", &Frame::beats_all)
      .def_readwrite("refusal_beside", &Frame::refusal_beside)
      .def_property_readonly("is_closed", &Frame::is_closed)
      .def_property_readonly("is_active", &Frame::is_active)
      .def("open_lease", &Frame::open_lease, py::arg("tag"), py::arg("holder"))
      .def("withhold", &Frame::withhold)
      .def("begin_capture", &Frame::begin_capture)
      .def("add_use", &Frame::add_use, py::arg("enter"), py::arg("arguments"), py::arg("leave"),
           py::arg("leaves_by_token") = false)
      .def("tag_thread", &Frame::tag_thread, py::arg("tag"), py::arg("backup"), py::arg("retain"))
      .def("leave_thread_untagged", [](Frame& self) { self.policy.tagging = EBBTIDE_TAGGING_OFF; })
      .def("push", [](const FramePointer& self) { FrameStack::mine().push(self); })
      .def("activate", &Frame::activate)
      .def("close", &close_frame)
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__", [](const FramePointer& self, const py::args&) { close_frame(self); });
}

// As a `class` statement makes it, so that subclasses need no call of `__init__`.
void make_class(py::module_& module, const char* name, const py::dict& members) {
  members["__module__"] = "ebbtide._core";
  const py::handle type(reinterpret_cast<PyObject*>(&PyType_Type));
  module.attr(name) = type(name, py::tuple(), members);
}

}  // namespace

void register_frames(py::module_& module) {
  using namespace py::literals;
  pthread_atfork(nullptr, nullptr, &Frame::forget_parent);
  register_frame(module);
  register_exit<Exit>(module, "_Exit", &call_exit, &leave_newest);
  register_exit<ScopeExit>(module, "_ScopeExit", &call_scope_exit, &exit_scope);
  const auto method = [&](auto function) { return py::cpp_function(function, py::is_method(module)); };
  make_class(module, "AllocationScope",
             py::dict("__enter__"_a = method(&enter_allocation_scope), "__exit__"_a = ExitOfClass<Exit>()));
  make_class(module, "Scope",
             py::dict("_is_open"_a = py::none(), "_failure"_a = py::none(), "__enter__"_a = method(&enter_scope),
                      "__exit__"_a = ExitOfClass<ScopeExit>(), "__del__"_a = method(&drop_scope)));
  module.def("others_in_regions", &FrameStack::others_in_regions);
  module.def("reenter", [] { FrameStack::mine().reenter(); });
  module.def("capture_count", &Frame::capture_count);
  module.def("call_together", &call_together);
  module.def("call_next", &call_next, py::arg("calls"));
}

}  // namespace ebbtide::bindings
