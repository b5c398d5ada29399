// Forks while another thread holds a lock of the simulated device's memory: the fork waits for the lock, so that the
// child finds it open.
#include "torch/cpu/region_memory.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

namespace ebbtide::cpu {
namespace {

// Forks a child that takes both locks. True if it ended.
bool is_child_free() {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    region_memory().routing.lock();
    region_memory().arena.lock();
    ::_exit(is_forked_child() ? 0 : 1);
  }
  int status = -1;
  return ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Whether a fork waits for the thread that holds the lock.
bool is_waited_for(const std::function<void()>& lock, const std::function<void()>& unlock) {
  region_memory();
  std::atomic<bool> has_forked{false};
  lock();
  std::thread forking([&] {
    EXPECT_TRUE(is_child_free());
    has_forked = true;
  });
  for (int tenth = 0; tenth < 30 && !has_forked; ++tenth) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  const bool is_waiting = !has_forked;
  unlock();
  forking.join();
  return is_waiting;
}

TEST(RegionMemory, Invariant10_AForkWaitsForTheRoutesAndFindsThemOpen) {
  EXPECT_TRUE(is_waited_for([] { region_memory().routing.lock(); }, [] { region_memory().routing.unlock(); }));
}

TEST(RegionMemory, Invariant10_AForkWaitsForTheArenaAndFindsItOpen) {
  EXPECT_TRUE(is_waited_for([] { region_memory().arena.lock(); }, [] { region_memory().arena.unlock(); }));
}

TEST(RegionMemory, Invariant10_TheParentGoesOn) {
  region_memory();
  EXPECT_TRUE(is_child_free());
  EXPECT_TRUE(is_child_free());
  EXPECT_FALSE(is_forked_child());
  Pool pool;
  region_memory().routing.enter(&pool, true);
  EXPECT_EQ(region_memory().routing.current(), &pool);
  EXPECT_TRUE(region_memory().routing.leave(&pool, true));
  EXPECT_EQ(region_memory().routing.current(), nullptr);
}

}  // namespace
}  // namespace ebbtide::cpu
