#include "torch/cpu/routing.h"

#include <memory>

namespace ebbtide::cpu {

namespace {

struct Frame {
  Pool* pool;
  uint64_t token;
  Frame* outer;
};

constinit thread_local Frame* innermost = nullptr;

template <typename Predicate>
bool remove_innermost(Predicate matches) {
  for (Frame** link = &innermost; *link != nullptr; link = &(*link)->outer) {
    if (!matches(**link)) continue;
    std::unique_ptr<Frame> gone(*link);
    *link = gone->outer;
    return true;
  }
  return false;
}

}  // namespace

Pool* Routing::current() const {
  if (innermost != nullptr) return innermost->pool;
  return newest_for_all_.load(std::memory_order_acquire);
}

uint64_t Routing::enter(Pool* pool) {
  const uint64_t token = last_token_.fetch_add(1, std::memory_order_relaxed) + 1;
  innermost = new Frame{pool, token, innermost};
  return token;
}

bool Routing::leave(const Pool* pool) {
  return remove_innermost([pool](const Frame& frame) { return frame.pool == pool; });
}

bool Routing::restore(uint64_t token) {
  return remove_innermost([token](const Frame& frame) { return frame.pool == nullptr && frame.token == token; });
}

void Routing::enter_all(Pool* pool) {
  std::lock_guard<std::mutex> guard(mutex_);
  for_all_.push_back(pool);
  newest_for_all_.store(pool, std::memory_order_release);
}

bool Routing::leave_all(const Pool* pool) {
  std::lock_guard<std::mutex> guard(mutex_);
  for (auto entry = for_all_.rbegin(); entry != for_all_.rend(); ++entry) {
    if (*entry != pool) continue;
    for_all_.erase(std::next(entry).base());
    newest_for_all_.store(for_all_.empty() ? nullptr : for_all_.back(), std::memory_order_release);
    return true;
  }
  return false;
}

}  // namespace ebbtide::cpu
