#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "core_fixture.h"

namespace ebbtide::testing {

class ThreadsTest : public CoreTest {
 protected:
  // Runs an operation in its own thread and delays `call`, so that the test can act in the middle of the operation.
  class Slow {
   public:
    Slow(const char* call, uint64_t microseconds, std::function<void()> act) : call_(call) {
      sim().clear_log();
      sim().set_delay(call, microseconds);
      thread_ = std::thread([this, act = std::move(act)] {
        try {
          act();
        } catch (const std::exception& error) {
          ADD_FAILURE() << error.what();
        }
        is_done_ = true;
      });
      while (sim().calls(call) == 0 && !is_done_) std::this_thread::yield();
    }
    ~Slow() { join(); }
    bool is_running() const { return !is_done_; }
    void join() {
      sim().set_delay(call_, 0);
      if (thread_.joinable()) thread_.join();
    }

   private:
    const char* call_;
    std::atomic<bool> is_done_{false};
    std::thread thread_;
  };

  static void in_threads(int count, const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int index = 0; index < count; ++index) {
      threads.emplace_back([&, index] {
        try {
          body(index);
        } catch (const std::exception& error) {
          ADD_FAILURE() << error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  static constexpr uint64_t kStand = 100'000;  // microseconds
  const std::vector<uint64_t> kFive = std::vector<uint64_t>(5, kChunk);
};

}  // namespace ebbtide::testing
