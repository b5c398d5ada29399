#pragma once

#include <atomic>
#include <mutex>
#include <thread>

namespace ebbtide {

// A mutex whose holders a signal handler can keep out for the length of one look, without touching a mutex itself: the
// interrupted thread may hold it, or be about to take it. The handler gives up where there is a holder, and a thread
// that takes the mutex waits for the looks that have begun. No handler of the same thread can be among them.
class HandlerSafeMutex {
 public:
  void lock() {
    mutex_.lock();
    is_held_.store(true);
    while (looks_.load() > 0) std::this_thread::yield();
  }
  void unlock() {
    is_held_.store(false);
    mutex_.unlock();
  }

  class Look {
   public:
    explicit Look(HandlerSafeMutex& mutex) noexcept : mutex_(mutex) {
      mutex_.looks_.fetch_add(1);
      is_granted_ = !mutex_.is_held_.load();  // after the count: one of the two sides sees the other
    }
    Look(const Look&) = delete;
    Look& operator=(const Look&) = delete;
    ~Look() { mutex_.looks_.fetch_sub(1); }
    bool is_granted() const { return is_granted_; }

   private:
    HandlerSafeMutex& mutex_;
    bool is_granted_;
  };

 private:
  std::mutex mutex_;
  std::atomic<bool> is_held_{false};
  std::atomic<int> looks_{0};
};

}  // namespace ebbtide
