#include "torch/cpu/routing.h"

#include <algorithm>
#include <iterator>
#include <memory>

namespace ebbtide::cpu {

namespace {

struct Frame {
  std::shared_ptr<Use> use;
  Frame* outer;
};

constinit thread_local Frame* innermost = nullptr;

// Removes the frames whose use is over, whichever thread ended it.
void prune() {
  for (Frame** link = &innermost; *link != nullptr;) {
    if (!(*link)->use->is_over.load(std::memory_order_acquire)) {
      link = &(*link)->outer;
      continue;
    }
    const std::unique_ptr<Frame> gone(*link);
    *link = gone->outer;
  }
}

}  // namespace

Pool* Routing::current() const {
  if (innermost != nullptr && innermost->use->is_over.load(std::memory_order_acquire)) prune();
  if (innermost != nullptr) return innermost->use->pool;
  return newest_for_all_.load(std::memory_order_acquire);
}

uint64_t Routing::enter(Pool* pool) {
  auto frame = std::make_unique<Frame>();
  frame->use = std::make_shared<Use>();
  frame->use->pool = pool;
  std::lock_guard<std::mutex> guard(mutex_);
  const uint64_t token = ++last_token_;
  uses_.emplace(token, frame->use);
  frame->outer = innermost;
  innermost = frame.release();
  return token;
}

bool Routing::leave(const Pool* pool) {
  return end([pool](uint64_t, const Use& use) { return use.pool == pool; });
}

bool Routing::restore(uint64_t token) {
  return end([token](uint64_t own, const Use& use) { return use.pool == nullptr && own == token; });
}

template <typename Predicate>
bool Routing::end(Predicate matches) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = std::find_if(uses_.rbegin(), uses_.rend(),
                                    [&](const auto& entry) { return matches(entry.first, *entry.second); });
    if (found == uses_.rend()) return false;
    found->second->is_over.store(true, std::memory_order_release);
    uses_.erase(std::next(found).base());
  }
  prune();
  return true;
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
