#include "base/private_files.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>

namespace ebbtide {

PrivateFiles& PrivateFiles::instance() {
  static PrivateFiles* const files = [] {
    static PrivateFiles* const made = new PrivateFiles;
    ::pthread_atfork([] { made->mutex_.lock(); }, [] { made->mutex_.unlock(); }, [] { made->close_all_in_child(); });
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
void PrivateFiles::close_all_in_child() noexcept {
  for (const int file : files_) ::close(file);
  files_.clear();
  mutex_.unlock();
}

}  // namespace ebbtide
