// The engine pool's lists grow under its lock. ThreadSanitizer would report a race if they did not. This test checks it
// directly: it examines each allocation that a thread makes while it creates an engine.
#include <gtest/gtest.h>

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "core_fixture.h"

namespace {

// Called by `new` in this thread. Allocations of the hook itself do not call it.
using NewHook = void (*)(size_t size_bytes);
thread_local constinit NewHook on_new = nullptr;

}  // namespace

void* operator new(size_t size_bytes) {
  if (const NewHook hook = std::exchange(on_new, nullptr)) {
    hook(size_bytes);
    on_new = hook;
  }
  if (void* const memory = std::malloc(size_bytes == 0 ? 1 : size_bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t /*size_bytes*/) noexcept { std::free(memory); }

namespace ebbtide::testing {
namespace {

using EnginePoolLockTest = CoreTest;

struct Probe {
  EnginePool* pool = nullptr;
  int kept_out = 0;
  std::vector<std::jthread> threads;
};
constinit Probe* probe = nullptr;

// When a list of the pool grows to its first entry, another thread tries to use the lists.
void look(size_t size_bytes) {
  if (size_bytes != sizeof(EnginePool::Entry)) return;
  const auto seen = std::make_shared<std::atomic<bool>>(false);
  probe->threads.emplace_back([seen, pool = probe->pool] {
    pool->trim();
    *seen = true;
  });
  for (int tenth = 0; tenth < 30 && !*seen; ++tenth) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  probe->kept_out += *seen ? 0 : 1;
}

TEST_F(EnginePoolLockTest, NobodyReadsTheListsWhileTheyGrow) {
  Probe own{.pool = &core().engines, .kept_out = 0, .threads = {}};
  probe = &own;
  {
    on_new = &look;
    const EnginePool::Loan loan = core().engines.borrow(0, {.bytes = kChunk, .cores = 1});
    on_new = nullptr;
  }
  own.threads.clear();
  EXPECT_EQ(own.kept_out, 2) << "of kept and poisoned engines";
}

}  // namespace
}  // namespace ebbtide::testing

#endif
