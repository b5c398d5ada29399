#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "api/ebbtide.h"

namespace ebbtide::bindings {

// Raises the exception of ebbtide.errors (ValueError for malformed arguments) for a failed call. The GIL is held.
void raise_if_failed(ebbtide_status status, const ebbtide_error& error);
[[noreturn]] void raise(const pybind11::object& exception);
[[noreturn]] void raise_state_error(const std::string& message);

}  // namespace ebbtide::bindings
