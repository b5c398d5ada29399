#pragma once

#include <cstdint>
#include <utility>

namespace ebbtide {

// Callers such as torch give back their caches when they are refused, and ask again at once, in the same thread and
// for the same size. This remembers the one call of a thread that was refused for that.
class FlushFirst {
 public:
  struct Call {
    const void* owner = nullptr;  // a tag; null for memory that the core does not place
    int device = -1;
    uint64_t size_bytes = 0;
    friend bool operator==(const Call&, const Call&) = default;
  };
  // At every call: whether the thread was refused this one, and asks again.
  bool is_second(const Call& call) noexcept { return std::exchange(refused_, {}) == call; }
  void note_refused(const Call& call) noexcept { refused_ = call; }

 private:
  Call refused_;
};

}  // namespace ebbtide
