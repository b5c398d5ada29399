// The engine pool's lists grow under its lock. ThreadSanitizer would report a race if they did not. This test checks it
// directly: it examines each allocation that a thread makes while it creates an engine.
#include <gtest/gtest.h>

#include "new_hook.h"

#if EBBTIDE_HAS_NEW_HOOK

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "core_fixture.h"

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

TEST_F(EnginePoolLockTest, TheListsAreNotReadWhileTheyGrow) {
  Probe own{.pool = &core().engines, .kept_out = 0, .threads = {}};
  probe = &own;
  {
    set_new_hook(&look);
    const EnginePool::Loan loan = core().engines.borrow(0, {.bytes = kChunk, .cores = 1});
    set_new_hook(nullptr);
  }
  own.threads.clear();
  EXPECT_EQ(own.kept_out, 2) << "of kept and poisoned engines";
}

}  // namespace
}  // namespace ebbtide::testing

#endif
