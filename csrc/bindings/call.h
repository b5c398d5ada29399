#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>
#include <unwind.h>

#include <string>
#include <utility>

#include "api/ebbtide.h"
#include "bindings/errors.h"

namespace ebbtide::bindings {

// Takes the GIL back. At interpreter exit, Python 3.10 to 3.13 ends a daemon thread that asks for the GIL by unwinding
// its stack. The unwinding would meet pybind11's catch (...) or a destructor, and end the process. So it stops here,
// and the thread sleeps until the process has ended, as Python 3.14 does by itself.
inline void take_gil(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {
    while (true) ::pause();
  }
}

// The unwinder's copy in this library must be initialised before it meets a stack that glibc's copy unwinds. Any use
// initialises it.
inline void prepare_unwinder() {
  _Unwind_Backtrace([](_Unwind_Context*, void*) { return _URC_END_OF_STACK; }, nullptr);
}

// Runs body without the GIL; body touches no Python object and does not throw.
template <typename Body>
auto without_gil(Body&& body) {
  PyThreadState* const state = PyEval_SaveThread();
  const auto result = std::forward<Body>(body)();
  take_gil(state);
  return result;
}

// Runs function(arguments..., &error) without the GIL and raises the error that it reports.
template <typename Function, typename... Arguments>
void call(Function function, Arguments... arguments) {
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  const ebbtide_status status = without_gil([&] { return function(arguments..., &error); });
  raise_if_failed(status, error);
}

// The same for a function that writes its result where its last argument points.
template <typename Result, typename Function, typename... Arguments>
Result get(Function function, Arguments... arguments) {
  Result result{};
  call(function, arguments..., &result);
  return result;
}

// A string with a NUL inside would be cut at the C boundary.
inline const char* check_text(const std::string& tag) {
  if (tag.find('\0') != std::string::npos) throw pybind11::value_error("a tag can't hold control characters");
  return tag.c_str();
}

inline const void* as_pointer(uint64_t address) { return reinterpret_cast<const void*>(address); }

void register_living(pybind11::module_& module);
void register_memory(pybind11::module_& module);
void register_operations(pybind11::module_& module);
void register_queries(pybind11::module_& module);
void register_settings(pybind11::module_& module);
void register_sharing(pybind11::module_& module);

}  // namespace ebbtide::bindings
