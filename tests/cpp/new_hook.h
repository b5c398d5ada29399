#pragma once

#include <cstddef>
#include <functional>

// The test program's `operator new`, which tests observe and make fail. Sanitizers have one of their own: under them
// EBBTIDE_HAS_NEW_HOOK is 0, and tests that need it are left out.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define EBBTIDE_HAS_NEW_HOOK 0
#else
#define EBBTIDE_HAS_NEW_HOOK 1
#endif

namespace ebbtide::testing {

// Called by `new` in this thread. Allocations of the hook itself do not call it. Null: none.
using NewHook = void (*)(size_t size_bytes);
void set_new_hook(NewHook hook);

// The number of calls of `new`, by any thread, that act makes.
size_t count_new(const std::function<void()>& act);
// From now on the k-th call of `new`, by any thread, throws std::bad_alloc. 0: none does.
void fail_new(size_t k);

}  // namespace ebbtide::testing
