// What the allocators of torch ask LMS where an allocation does not fit.
#pragma once

#include <pybind11/pybind11.h>

namespace ebbtide::lms {

void add_allocator_hooks(pybind11::module_& module);

}  // namespace ebbtide::lms
