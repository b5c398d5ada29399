#include "bindings/errors.h"

#include <string>

namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

py::object make_exception(ebbtide_status status, const ebbtide_error& error) {
  const py::module_ errors = py::module_::import("ebbtide.errors");
  const py::object message = errors.attr("advise")(error.message, error.cause);
  switch (status) {
    case EBBTIDE_OUT_OF_MEMORY:
      return errors.attr("OutOfMemoryError")(message, error.requested_bytes, error.free_bytes, error.limit_bytes,
                                             error.device);
    case EBBTIDE_STATE_ERROR: return errors.attr("StateError")(message);
    case EBBTIDE_DRIVER_ERROR:
      return errors.attr("DriverError")(error.message, error.call, error.code, error.arguments);
    case EBBTIDE_STORE_ERROR:
      return errors.attr("StoreError")(message, error.requested_bytes, error.free_bytes, error.limit_bytes);
    default: return errors.attr("Error")(std::string("internal error, please report it: ") + error.message);
  }
}

}  // namespace

void raise_if_failed(ebbtide_status status, const ebbtide_error& error) {
  if (status == EBBTIDE_OK) return;
  if (status == EBBTIDE_INVALID_ARGUMENT) throw py::value_error(error.message);
  const py::object exception = make_exception(status, error);
  if (error.cause != EBBTIDE_CAUSE_OTHER) exception.attr("_cause") = error.cause;
  raise(exception);
}

void raise(const py::object& exception) {
  PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
  throw py::error_already_set();
}

void raise_state_error(const std::string& message) {
  raise(py::module_::import("ebbtide.errors").attr("StateError")(message));
}

}  // namespace ebbtide::bindings
