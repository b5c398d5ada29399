// autograd's hooks for saved tensors without Python: a call of Python for each saved tensor costs small models a lot.
#pragma once

#include <Python.h>

namespace ebbtide::lms {

// From now on, where the innermost pair of saved-tensor hooks of a thread begins with `pack`, autograd gets hooks in
// C++ that do the same as the pair. False where torch offers no way in: then it calls the pair. `unpack` is for
// compiled autograd, which knows Python's hooks alone. Both live for ever. May be called again.
bool follow_saved_tensors(PyObject* pack, PyObject* unpack);

// What `pack` and the hooks do beside packing: with a limit of 0, everything that can leaves now.
void evict_at_once(bool can_leave);

}  // namespace ebbtide::lms
