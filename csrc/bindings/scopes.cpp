// `with` blocks that an interrupt cannot leave half entered or half exited.
//
// Facts about CPython that this relies on:
// - Python runs signal handlers and asynchronous exceptions where a call returns to bytecode, where a function begins
//   and where a loop goes back. It never does so inside C, nor between a C `__enter__` and the block that it guards
//   (BEFORE_WITH, SETUP_WITH in 3.10). This was read in CPython's source; tests do not look at bytecode, but interrupt
//   loops of such blocks. The call of `__exit__` is one such C call, and everything before it belongs to the block. So
//   a `with` is intact if its `__enter__` and `__exit__` run no bytecode after the step that counts.
// - Python 3.14 calls `__enter__` by a plain CALL, after which an exception may arrive outside the block. By then it
//   has looked `__exit__` up. So that attribute is an object (Exit) that belongs to this one `with`, and closes the
//   frame if it is destroyed without having been called.
// - That object also knows its frame when another thread calls it: a generator suspended inside a `with` may be
//   collected in any thread.
//
// AllocationScope is short. `_prepare(frame)` in Python fills the frame and may be interrupted anywhere. Then C closes
// what the frame holds, or shows the frame to torch.
//
// Scope is long. `_open()` and `_close()` are Python. An interrupted `_close` runs again until it completes, so it must
// start from any state that `_open` or an earlier `_close` left. It returns its own failure instead of raising it; an
// exception that it raises is an interrupt.
#include <new>
#include <utility>

#include "bindings/frames.h"

namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

constexpr int kMostCloses = 1000;

// Runs body() as a Python function: its C++ exceptions are raised in Python.
template <typename Body>
PyObject* as_python(Body&& body) noexcept {
  try {
    return std::forward<Body>(body)();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

py::object call_method(PyObject* self, const char* name, PyObject* argument = nullptr) {
  auto result = py::reinterpret_steal<py::object>(argument == nullptr ? PyObject_CallMethod(self, name, nullptr)
                                                                      : PyObject_CallMethod(self, name, "O", argument));
  if (!result) throw py::error_already_set();
  return result;
}

// --- Exit: what a `with` over an AllocationScope calls at its end ---

struct Exit {
  PyObject_HEAD PyObject* owner;
  FramePointer frame;
  std::weak_ptr<FrameStack> awaited_by;  // the stack of the thread that looked it up
  bool opened_nothing;
};

PyTypeObject* exit_type = nullptr;

bool is_generator_exit(PyObject* kind) {
  return kind != nullptr && kind != Py_None && PyErr_GivenExceptionMatches(kind, PyExc_GeneratorExit) != 0;
}

// What was entered inside it is still open: somebody stands in there, and took what was allocated since.
void warn_of_inner(const Frame& frame, const Frame& inner) {
  const std::string message =
      frame.name() + " ends before " + inner.name() +
      ", which was entered inside it: a generator or a task waits in there, and what this thread allocated meanwhile "
      "belongs to the latter. Don't yield or await inside a region";
  if (PyErr_WarnEx(PyExc_RuntimeWarning, message.c_str(), 1) != 0) throw py::error_already_set();
}

void leave(const FramePointer& frame, PyObject* kind) {
  const auto stack = frame->stack.lock();
  // The thread that entered it has ended, or is a parent's.
  if (stack == nullptr || frame->is_closed || !stack->is_of_this_process()) return;
  const bool is_elsewhere = !stack->is_mine();
  const FramePointer inner = is_elsewhere ? nullptr : stack->inside(frame);
  stack->close(frame);
  if (is_elsewhere && !is_generator_exit(kind)) {
    raise_state_error(
        "another thread entered this: it is left now, and that thread has not been inside since; leave it in the "
        "thread that entered it");
  }
  if (!frame->after.is_none()) {
    const auto result = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(frame->after.ptr()));
    if (!result) throw py::error_already_set();
  }
  if (inner != nullptr && !is_generator_exit(kind)) warn_of_inner(*frame, *inner);
}

// By hand: the innermost frame of this thread that owner has opened.
void leave_newest(PyObject* owner, PyObject* kind) {
  const FramePointer frame = FrameStack::mine().find(owner);
  if (frame != nullptr) return leave(frame, kind);
  call_method(owner, "_refuse_exit", FrameStack::is_open_elsewhere(owner) ? Py_True : Py_False);
}

PyObject* call_exit(PyObject* self, PyObject* arguments, PyObject*) {
  return as_python([&]() -> PyObject* {
    auto* const exit = reinterpret_cast<Exit*>(self);
    PyObject* const kind = PyTuple_GET_SIZE(arguments) > 0 ? PyTuple_GET_ITEM(arguments, 0) : nullptr;
    const FramePointer frame = std::exchange(exit->frame, nullptr);
    if (frame != nullptr) {
      leave(frame, kind);
    } else if (!std::exchange(exit->opened_nothing, false)) {
      leave_newest(exit->owner, kind);
    }
    Py_RETURN_NONE;
  });
}

void destroy_exit(PyObject* self) {
  auto* const exit = reinterpret_cast<Exit*>(self);
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  try {
    const auto waiting = exit->awaited_by.lock();
    if (waiting != nullptr && waiting->awaiting_exit == self) waiting->awaiting_exit = nullptr;
    if (const FramePointer frame = std::exchange(exit->frame, nullptr)) leave(frame, PyExc_GeneratorExit);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("the end of a region");
  } catch (const std::exception&) {
    // No memory, or a thread that is going: its stack closes the frame.
  }
  PyErr_Restore(type, value, trace);
  exit->frame.~FramePointer();
  exit->awaited_by.~weak_ptr();
  Py_CLEAR(exit->owner);
  PyTypeObject* const own = Py_TYPE(self);
  own->tp_free(self);
  Py_DECREF(own);
}

// --- the descriptor behind `__exit__` ---

PyObject* get_exit(PyObject* self, PyObject* owner, PyObject*) {
  if (owner == nullptr || owner == Py_None) return Py_NewRef(self);
  return as_python([&]() -> PyObject* {
    FrameStack& mine = FrameStack::mine();
    auto* const exit = reinterpret_cast<Exit*>(exit_type->tp_alloc(exit_type, 0));
    if (exit == nullptr) throw py::error_already_set();
    new (&exit->frame) FramePointer();
    new (&exit->awaited_by) std::weak_ptr<FrameStack>(mine.weak_from_this());
    exit->owner = Py_NewRef(owner);
    exit->opened_nothing = false;
    mine.awaiting_exit = reinterpret_cast<PyObject*>(exit);
    return reinterpret_cast<PyObject*>(exit);
  });
}

// type(scope).__exit__(scope, ...), as ExitStack calls it.
PyObject* call_unbound(PyObject*, PyObject* arguments, PyObject*) {
  return as_python([&]() -> PyObject* {
    if (PyTuple_GET_SIZE(arguments) == 0) {
      PyErr_SetString(PyExc_TypeError, "__exit__ needs the scope");
      throw py::error_already_set();
    }
    PyObject* const kind = PyTuple_GET_SIZE(arguments) > 1 ? PyTuple_GET_ITEM(arguments, 1) : nullptr;
    leave_newest(PyTuple_GET_ITEM(arguments, 0), kind);
    Py_RETURN_NONE;
  });
}

// --- AllocationScope ---

PyObject* enter_allocation_scope(PyObject* self, PyObject*) {
  return as_python([&]() -> PyObject* {
    auto* const awaiting = reinterpret_cast<Exit*>(std::exchange(FrameStack::mine().awaiting_exit, nullptr));
    // Of this `with`: it was looked up just before. By hand there may be none, or one of another.
    Exit* const exit =
        awaiting != nullptr && awaiting->owner == self && awaiting->frame == nullptr ? awaiting : nullptr;
    const py::object kept = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(exit));
    const auto frame = std::make_shared<Frame>();
    frame->owner = py::reinterpret_borrow<py::object>(self);
    try {
      if (call_method(self, "_prepare", py::cast(frame).ptr()).is(py::bool_(false))) {
        if (exit != nullptr) exit->opened_nothing = true;
        return Py_NewRef(self);
      }
    } catch (py::error_already_set&) {
      frame->end_all();  // the traceback may keep the frame alive
      throw;
    }
    // From here on nothing of Python runs.
    FrameStack::mine().push(frame);
    if (exit != nullptr) exit->frame = frame;
    return Py_NewRef(self);
  });
}

// --- Scope ---

struct Scope {
  PyObject_HEAD PyObject* failure;
  enum class State { kNew, kOpen, kOver } state;
};

// Repeats it until it completes. Returns the failure that it reports, or None; throws the first interrupt.
py::object close_whole(PyObject* self) {
  FirstError interrupt;
  py::object failure = py::none();
  for (int count = 0; count < kMostCloses; ++count) {
    auto result = py::reinterpret_steal<py::object>(PyObject_CallMethod(self, "_close", nullptr));
    if (result) {
      failure = std::move(result);
      break;
    }
    interrupt.take_current();
  }
  interrupt.raise_if_any(failure);
  return failure;
}

void raise_failure(const py::object& failure) {
  if (failure.is_none()) return;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(failure.ptr())), failure.ptr());
  throw py::error_already_set();
}

PyObject* enter_scope(PyObject* self, PyObject*) {
  return as_python([&]() -> PyObject* {
    auto* const scope = reinterpret_cast<Scope*>(self);
    if (scope->state != Scope::State::kNew) raise_state_error("this can be entered once: make another one");
    scope->state = Scope::State::kOpen;
    try {
      return call_method(self, "_open").release().ptr();
    } catch (py::error_already_set& error) {
      scope->state = Scope::State::kOver;
      const py::object value = error.value();
      Py_XSETREF(scope->failure, Py_NewRef(value.ptr()));
      py::object failure = py::none();
      try {
        failure = close_whole(self);
      } catch (py::error_already_set&) {
        // The first interrupt is on its way.
      }
      Py_CLEAR(scope->failure);
      if (failure.is_none() || failure.is(value)) throw;
      PyException_SetContext(failure.ptr(), Py_NewRef(value.ptr()));
      raise_failure(failure);
      return nullptr;
    }
  });
}

PyObject* exit_scope(PyObject* self, PyObject* arguments) {
  return as_python([&]() -> PyObject* {
    auto* const scope = reinterpret_cast<Scope*>(self);
    if (scope->state != Scope::State::kOpen)
      raise_state_error("this is not open: it was left already, or never entered");
    scope->state = Scope::State::kOver;
    if (PyTuple_GET_SIZE(arguments) > 1) Py_XSETREF(scope->failure, Py_NewRef(PyTuple_GET_ITEM(arguments, 1)));
    const py::object failure = close_whole(self);
    Py_CLEAR(scope->failure);
    raise_failure(failure);
    Py_RETURN_NONE;
  });
}

PyObject* get_failure(PyObject* self, void*) {
  PyObject* const failure = reinterpret_cast<Scope*>(self)->failure;
  return Py_NewRef(failure == nullptr ? Py_None : failure);
}

// Dropped inside: as the end of a generator would.
void finalize_scope(PyObject* self) {
  auto* const scope = reinterpret_cast<Scope*>(self);
  if (scope->state != Scope::State::kOpen) return;
  scope->state = Scope::State::kOver;
  PyObject* type = nullptr;
  PyObject* value = nullptr;
  PyObject* trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  try {
    raise_failure(close_whole(self));
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("the end of a `with` that was dropped");
  }
  PyErr_Restore(type, value, trace);
}

int traverse_scope(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<Scope*>(self)->failure);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear_scope(PyObject* self) {
  Py_CLEAR(reinterpret_cast<Scope*>(self)->failure);
  return 0;
}

void destroy_scope(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear_scope(self);
  PyTypeObject* const own = Py_TYPE(self);
  own->tp_free(self);
  Py_DECREF(own);
}

// --- the types ---

PyTypeObject* make_type(const char* name, int size, unsigned long flags, PyType_Slot* slots) {
  PyType_Spec spec = {name, size, 0, static_cast<unsigned int>(flags), slots};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return reinterpret_cast<PyTypeObject*>(type);
}

template <typename Function>
void* slot_of(Function* function) {
  return reinterpret_cast<void*>(function);
}

py::object make_exit_descriptor() {
  PyType_Slot slots[] = {{Py_tp_descr_get, slot_of(&get_exit)}, {Py_tp_call, slot_of(&call_unbound)}, {0, nullptr}};
  PyTypeObject* const type = make_type("ebbtide._core.ExitOfClass", sizeof(PyObject),
                                       Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots);
  return py::reinterpret_steal<py::object>(type->tp_alloc(type, 0));
}

}  // namespace

void register_scopes(py::module_& module) {
  PyType_Slot exit_slots[] = {{Py_tp_call, slot_of(&call_exit)}, {Py_tp_dealloc, slot_of(&destroy_exit)}, {0, nullptr}};
  exit_type =
      make_type("ebbtide._core.Exit", sizeof(Exit), Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, exit_slots);

  static PyMethodDef allocation_methods[] = {{"__enter__", enter_allocation_scope, METH_NOARGS, nullptr},
                                             {nullptr, nullptr, 0, nullptr}};
  PyType_Slot allocation_slots[] = {{Py_tp_methods, allocation_methods}, {0, nullptr}};
  PyTypeObject* const allocation_scope = make_type("ebbtide._core.AllocationScope", sizeof(PyObject),
                                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, allocation_slots);
  const py::object scope_of_with = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(allocation_scope));
  scope_of_with.attr("__exit__") = make_exit_descriptor();
  module.attr("AllocationScope") = scope_of_with;

  static PyMethodDef scope_methods[] = {{"__enter__", enter_scope, METH_NOARGS, nullptr},
                                        {"__exit__", exit_scope, METH_VARARGS, nullptr},
                                        {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef scope_fields[] = {{"_failure", get_failure, nullptr, nullptr, nullptr},
                                       {nullptr, nullptr, nullptr, nullptr, nullptr}};
  PyType_Slot scope_slots[] = {{Py_tp_methods, scope_methods},
                               {Py_tp_getset, scope_fields},
                               {Py_tp_finalize, slot_of(&finalize_scope)},
                               {Py_tp_traverse, slot_of(&traverse_scope)},
                               {Py_tp_clear, slot_of(&clear_scope)},
                               {Py_tp_dealloc, slot_of(&destroy_scope)},
                               {0, nullptr}};
  PyTypeObject* const scope = make_type("ebbtide._core.Scope", sizeof(Scope),
                                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, scope_slots);
  module.attr("Scope") = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(scope));
}

}  // namespace ebbtide::bindings
