#pragma once

#include <pybind11/pybind11.h>

// torch's expandable segments, where large model support wants them. Before torch 2.13 the setting is one of the whole
// process, and no pool of ours works beside it. So it is off while a pool of ours is open or a graph is captured. Used
// with the GIL held; torch's setter is built in, so nothing can interrupt these functions midway. A child that is
// forked inside a region keeps them off until it leaves a region of its own.
namespace ebbtide::bindings {

void hold_segments();
void release_segments() noexcept;
// In a forked child, which has none of the parent's holds.
void forget_segment_holds();

void register_segments(pybind11::module_& module);

}  // namespace ebbtide::bindings
