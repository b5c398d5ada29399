// `ctx.saved_tensors` of autograd functions in Python: the objects that were saved, as without LMS.
//
// torch makes a new tensor of what a hook for saved tensors returns, if that requires a gradient, so attributes and
// class are lost, and nothing but backward seems to hold it: a function that returns it as a gradient gives away memory
// that others still use, since AccumulateGrad keeps such a gradient without a copy.
#pragma once

#include <pybind11/pybind11.h>

namespace ebbtide::lms {

// What torch's own getter returns, with each tensor replaced by the one that was saved, if that lives. Where it does
// not, its class and attributes are there again.
pybind11::object read_saved_tensors(const pybind11::object& getter, const pybind11::object& context);

// What backward of a function returns: `apply` of torch's class. A gradient that stands for a saved tensor which is
// gone, and whose memory something else still needs (a graph that is kept, another node, another gradient), is copied.
pybind11::object run_backward(const pybind11::object& apply, const pybind11::args& arguments);

}  // namespace ebbtide::lms
