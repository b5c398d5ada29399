#pragma once

#include <cstddef>
#include <string>
#include <vector>

// Which driver calls of an operation a sweep makes fail, one after the other.
namespace ebbtide::testing {

// The names of the calls in the simulator's log, in order.
std::vector<std::string> logged_calls();

// EBBTIDE_SWEEP=all (`make sweep`).
bool sweeps_all();

// The numbers of the calls, from 1 on: each of them if sweeps_all(), otherwise the first, a middle and the last call of
// each function, before and after the first that gives memory up, maps it or fills it. Invariant 3 tells these phases
// apart, and calls of one function in one phase fail alike.
std::vector<size_t> calls_to_fail(const std::vector<std::string>& names);

}  // namespace ebbtide::testing
