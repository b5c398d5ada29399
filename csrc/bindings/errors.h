#pragma once

#include "api/ebbtide.h"

namespace ebbtide::bindings {

// Raises the exception of ebbtide.errors (ValueError for malformed arguments) that a failed call asks for. The GIL is held.
void raise_if_failed(ebbtide_status status, const ebbtide_error& error);

}  // namespace ebbtide::bindings
