// autograd's hooks for saved tensors, in every thread and without Python: torch's own way to install hooks is a pair of
// Python functions for each thread, which it also takes with it into every node of a backward, with the GIL each time.
#pragma once

#include <Python.h>

#include <optional>

#include "torch/lms/packed.h"

namespace torch::autograd {
class SavedVariable;
}

namespace ebbtide::lms {

// A copy of the Packed that autograd keeps there; empty where it keeps something else. Call it with the GIL.
std::optional<Packed> packed_of(const torch::autograd::SavedVariable& saved);

// From now on, while the rules are on, what autograd saves outside other hooks is a Packed. False where torch's table
// of virtual functions can't be changed: nothing is hooked then. `unpack` takes a Packed from Python: compiled autograd
// knows Python's hooks alone. It lives for ever. May be called again.
bool follow_saved_tensors(PyObject* unpack);

}  // namespace ebbtide::lms
