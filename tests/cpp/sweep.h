#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// Which driver calls, and which calls of `new`, of an operation a sweep makes fail, one after the other.
namespace ebbtide::testing {

using Act = std::function<void()>;

// The names of the calls in the simulator's log, in order.
std::vector<std::string> logged_calls();

// EBBTIDE_SWEEP=all (`make sweep`).
bool sweeps_all();

struct CallFailure {
  size_t k;  // the number of the call, from 1 on
  std::string name;
  int code;
  uint64_t times;  // 0: all calls after it fail as well

  // Makes the simulator fail.
  void inject() const;
  std::string text() const;
};

// With sweeps_all(), each call fails with each code, once and for good. Otherwise calls are sorted by function and by
// phase, which is before or after the first call that gives memory up, maps it or fills it: invariant 3 tells these
// phases apart, and calls of one function in one phase fail alike. Of each such group the first and the last call fail
// once; the first gives out-of-memory if it takes memory. Of every other group, and of all that take memory, all calls
// from a middle one on fail.
std::vector<CallFailure> failures_of(const std::vector<std::string>& names);

// Whether act threw. The error has a message.
bool fails(const Act& act);

// Runs act with its k-th `new` failing, for about 20 values of k, or for each with sweeps_all(). `begin` comes before
// each run, `check` after it, and `end` after act was repeated.
void sweep_new(const Act& begin, const Act& act, const Act& check, const Act& end);

}  // namespace ebbtide::testing
