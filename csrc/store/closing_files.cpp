#include "store/closing_files.h"

#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace ebbtide {
namespace {

struct ClosingFile {
  int file;
  CloseFile close;
};

// Leaked on purpose, as all state of the core: the thread may outlive what is destroyed at the process's end.
struct ClosingFiles {
  const pid_t process = ::getpid();
  std::mutex mutex;
  std::condition_variable ended;
  std::vector<ClosingFile> files;
  bool has_thread = false;
};
ClosingFiles& closing_files() {
  static auto* const instance = new ClosingFiles;
  return *instance;
}

void close_all(ClosingFiles& closing) noexcept {
  std::unique_lock lock(closing.mutex);
  while (!closing.files.empty()) {
    const ClosingFile next = closing.files.back();
    closing.files.pop_back();
    lock.unlock();
    next.close(next.file);
    lock.lock();
  }
  closing.has_thread = false;
  closing.ended.notify_all();
}

bool try_close_later(const ClosingFile& file) noexcept {
  ClosingFiles& closing = closing_files();
  if (::getpid() != closing.process) return false;
  const std::lock_guard lock(closing.mutex);
  try {
    closing.files.push_back(file);
  } catch (...) {
    return false;
  }
  if (closing.has_thread) return true;
  try {
    std::thread([&closing] { close_all(closing); }).detach();
  } catch (...) {
    closing.files.pop_back();
    return false;
  }
  closing.has_thread = true;
  return true;
}

}  // namespace

void close_later(int file, CloseFile close) noexcept {
  if (!try_close_later({file, close})) close(file);
}

bool wait_until_closed() noexcept {
  ClosingFiles& closing = closing_files();
  if (::getpid() != closing.process) return false;
  std::unique_lock lock(closing.mutex);
  if (!closing.has_thread) return false;
  closing.ended.wait(lock, [&] { return !closing.has_thread; });
  return true;
}

}  // namespace ebbtide
