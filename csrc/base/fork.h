#pragma once

#include <mutex>
#include <vector>

// What this library does around a fork. Before: it takes the lock of the private files, so that none is half open.
// After: it releases the lock; the child closes these files first. The child of a process that has begun a core is a
// forked child from then on (invariant 10).
namespace ebbtide {

void note_core_begun();
bool is_forked_child() noexcept;

// Open files that a forked child does not keep: the child would hold their locks and their space for a parent that is
// gone.
class PrivateFiles {
 public:
  static PrivateFiles& instance();
  // While it is held no fork happens: what is opened is remembered, or closed again, before a child can have it.
  std::unique_lock<std::mutex> hold_forks() { return std::unique_lock(mutex_); }
  // open: makes a descriptor, or -1 and errno. Returns what it returned.
  template <typename Open>
  int open(const Open& open) {
    const auto held = hold_forks();
    files_.reserve(files_.size() + 1);
    const int file = open();
    if (file >= 0) files_.push_back(file);
    return file;
  }
  // close: of this descriptor. Not called in a child of the process that opened it, where the number is another file's.
  template <typename Close>
  void close(int file, const Close& close) noexcept {
    const auto held = hold_forks();
    if (forget(file)) close();
  }

 private:
  PrivateFiles() = default;
  bool forget(int file) noexcept;
  void after_fork_in_child() noexcept;
  std::mutex mutex_;
  std::vector<int> files_;
};

}  // namespace ebbtide
