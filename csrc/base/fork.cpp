#include "base/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

namespace ebbtide {
namespace {

constinit std::atomic<bool> is_core_begun{false};
constinit std::atomic<bool> is_child{false};

}  // namespace

bool is_forked_child() noexcept { return is_child.load(std::memory_order_relaxed); }

void note_core_begun() {
  PrivateFiles::instance();  // which registers the handlers
  is_core_begun.store(true);
}

PrivateFiles& PrivateFiles::instance() {
  static PrivateFiles* const files = [] {
    static PrivateFiles* const made = new PrivateFiles;
    ::pthread_atfork([] { made->mutex_.lock(); }, [] { made->mutex_.unlock(); }, [] { made->after_fork_in_child(); });
    return made;
  }();
  return *files;
}

bool PrivateFiles::forget(int file) noexcept {
  const auto found = std::find(files_.begin(), files_.end(), file);
  if (found == files_.end()) return false;
  files_.erase(found);
  return true;
}

// The lock is the child's since the fork.
void PrivateFiles::after_fork_in_child() noexcept {
  for (const int file : files_) ::close(file);
  files_.clear();
  mutex_.unlock();
  is_child.store(is_core_begun.load());
}

}  // namespace ebbtide
