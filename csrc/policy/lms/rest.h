#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

// Steps are not followed any more once a few in a row have fitted. Used by the torch extension as well: standard C++
// only. is_on() may be asked by any thread; the rest is for one at a time.
namespace ebbtide::policy {

class Rest {
 public:
  static constexpr uint32_t kStepsThatFit = 3;

  bool is_on() const { return is_on_.load(std::memory_order_relaxed); }

  void step_ended(bool did_fit) {
    fitting_ = did_fit ? fitting_ + 1 : 0;
    if (fitting_ >= needed_) is_on_.store(true, std::memory_order_relaxed);
  }

  // Programs whose steps differ are not short in each: it takes longer from now on.
  void fell_short() {
    if (is_on() && !is_over_) needed_ = std::min(needed_ * 16, kMostNeeded);
    is_over_ = is_on();
    fitting_ = 0;
  }

  // Whether memory was short since it began, or the limit is another: it ends as soon as nothing is saved.
  bool is_over() const { return is_over_; }

  void end() {
    is_over_ = false;
    fitting_ = 0;
    is_on_.store(false, std::memory_order_relaxed);
  }

  // Under another limit nothing is known.
  void forget() {
    is_over_ = is_on();
    fitting_ = 0;
    needed_ = kStepsThatFit;
  }

 private:
  static constexpr uint32_t kMostNeeded = 4096;
  std::atomic<bool> is_on_{false};
  bool is_over_ = false;
  uint32_t needed_ = kStepsThatFit;
  uint32_t fitting_ = 0;
};

}  // namespace ebbtide::policy
