#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>

namespace ebbtide {

// The steps of copies ahead that hold tags now. Each ends within milliseconds, so a thread that is short of memory may
// wait for that. Its lock is taken under the registry's.
class AheadSteps {
 public:
  // The number of a new step of this thread. 0 stands for none below.
  uint64_t begin() {
    const std::lock_guard lock(mutex_);
    steps_.emplace(newest_ + 1, Step{std::this_thread::get_id()});
    return ++newest_;
  }
  // Memory was freed that waits for the end of the step.
  void note_freed(uint64_t number) noexcept {
    const std::lock_guard lock(mutex_);
    if (const auto step = steps_.find(number); step != steps_.end()) step->second.has_freed_memory = true;
  }
  // Once the caller has destroyed the allocations that were freed meanwhile.
  void end(uint64_t number) noexcept {
    if (number == 0) return;
    const std::lock_guard lock(mutex_);
    const auto ended = steps_.find(number);
    freeing_count_ += ended->second.has_freed_memory ? 1 : 0;
    steps_.erase(ended);
    ended_.notify_all();
  }
  // Waits for the end of the steps that are under way now: of those only in which memory was freed, or of all. True if
  // there was one. Never waits in a thread that is itself in a step: no step waits for another.
  enum class Which { kWithFreedMemory, kAll };
  bool wait(Which which) {
    std::unique_lock lock(mutex_);
    if (is_mine_locked()) return false;
    const auto is_over = [&, newest = newest_] {
      return std::none_of(steps_.begin(), steps_.end(), [&](const auto& each) {
        return each.first <= newest && (which == Which::kAll || each.second.has_freed_memory);
      });
    };
    if (is_over()) return false;
    ended_.wait(lock, is_over);
    return true;
  }
  // How many have ended in which memory was freed.
  uint64_t freeing_count() const { return freeing_count_.load(); }
  // Whether the calling thread is in a step.
  bool is_in_one() const {
    const std::lock_guard lock(mutex_);
    return is_mine_locked();
  }

 private:
  struct Step {
    std::thread::id thread;
    bool has_freed_memory = false;
  };
  bool is_mine_locked() const {
    return std::any_of(steps_.begin(), steps_.end(),
                       [self = std::this_thread::get_id()](const auto& each) { return each.second.thread == self; });
  }
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  std::map<uint64_t, Step> steps_;
  uint64_t newest_ = 0;
  std::atomic<uint64_t> freeing_count_{0};
};

}  // namespace ebbtide
