#include "new_hook.h"

#include <atomic>
#include <cstdlib>
#include <new>
#include <utility>

#if EBBTIDE_HAS_NEW_HOOK

namespace {

thread_local constinit ebbtide::testing::NewHook on_new = nullptr;
constinit std::atomic<size_t> calls{0};
constinit std::atomic<size_t> failing_call{0};

}  // namespace

void* operator new(size_t size_bytes) {
  if (calls.fetch_add(1) + 1 == failing_call.load()) throw std::bad_alloc();
  if (const auto hook = std::exchange(on_new, nullptr)) {
    hook(size_bytes);
    on_new = hook;
  }
  if (void* const memory = std::malloc(size_bytes == 0 ? 1 : size_bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t /*size_bytes*/) noexcept { std::free(memory); }

namespace ebbtide::testing {

void set_new_hook(NewHook hook) { on_new = hook; }

size_t count_new(const std::function<void()>& act) {
  const size_t before = calls.load();
  act();
  return calls.load() - before;
}

void fail_new(size_t k) {
  failing_call.store(0);
  if (k > 0) failing_call.store(calls.load() + k);
}

}  // namespace ebbtide::testing

#endif
