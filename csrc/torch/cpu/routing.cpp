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

uint64_t Routing::enter(Pool* pool, bool is_for_all) {
  const auto use = std::make_shared<Use>(pool, is_for_all);
  auto frame = std::make_unique<Frame>(Frame{use, innermost});
  std::lock_guard<std::mutex> guard(mutex_);
  const uint64_t token = ++last_token_;
  uses_.emplace(token, use);
  if (is_for_all)
    newest_for_all_.store(pool, std::memory_order_release);
  else
    innermost = frame.release();
  return token;
}

bool Routing::leave(const Pool* pool, bool is_for_all) {
  return end([&](uint64_t, const Use& use) { return use.pool == pool && use.is_for_all == is_for_all; });
}

bool Routing::restore(uint64_t token) {
  return end([token](uint64_t own, const Use& use) { return use.pool == nullptr && own == token; });
}

template <typename Predicate>
bool Routing::end(Predicate matches) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto newest = [&](const auto& is_wanted) {
      return std::find_if(uses_.rbegin(), uses_.rend(),
                          [&](const auto& entry) { return is_wanted(entry.first, *entry.second); });
    };
    const auto found = newest(matches);
    if (found == uses_.rend()) return false;
    found->second->is_over.store(true, std::memory_order_release);
    uses_.erase(std::next(found).base());
    const auto for_all = newest([](uint64_t, const Use& use) { return use.is_for_all; });
    newest_for_all_.store(for_all == uses_.rend() ? nullptr : for_all->second->pool, std::memory_order_release);
  }
  prune();
  return true;
}

}  // namespace ebbtide::cpu
