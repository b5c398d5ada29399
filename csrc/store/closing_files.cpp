#include "store/closing_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "base/fork.h"
#include "store/backup_file.h"

namespace ebbtide {
namespace {

struct ClosingFile {
  int file;
  size_t free_bytes;
  const FileCalls* calls;

  void close() const noexcept {
    if (free_bytes > 0)
      calls->fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(free_bytes));
    PrivateFiles::instance().close(file, [&] { calls->close(file); });
  }
};

// Leaked on purpose, like all state of the core: the thread may outlive objects destroyed at the process's end.
struct ClosingFiles {
  const pid_t process = ::getpid();
  std::mutex mutex;
  std::condition_variable ended;
  std::vector<ClosingFile> files;
  bool has_thread = false;
  uint64_t closed = 0;
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
    next.close();
    lock.lock();
    ++closing.closed;
  }
  closing.has_thread = false;
  closing.ended.notify_all();
}

bool try_close_later(const ClosingFile& file) noexcept {
  ClosingFiles& closing = closing_files();
  const std::lock_guard lock(closing.mutex);
  try {
    closing.files.push_back(file);
    if (!closing.has_thread) std::thread([&closing] { close_all(closing); }).detach();
  } catch (...) {
    if (!closing.has_thread) closing.files.clear();  // it was the only one
    return false;
  }
  closing.has_thread = true;
  return true;
}

}  // namespace

void close_later(int file, size_t free_bytes, const FileCalls& calls) noexcept {
  if (::getpid() != closing_files().process) return;  // it was closed at the fork
  const ClosingFile closing = {file, free_bytes, &calls};
  if (!try_close_later(closing)) closing.close();
}

void wait_until_closed() noexcept {
  ClosingFiles& closing = closing_files();
  if (::getpid() != closing.process) return;
  std::unique_lock lock(closing.mutex);
  closing.ended.wait(lock, [&] { return !closing.has_thread; });
}

uint64_t files_closed() noexcept {
  ClosingFiles& closing = closing_files();
  if (::getpid() != closing.process) return 0;
  const std::lock_guard lock(closing.mutex);
  return closing.closed;
}

}  // namespace ebbtide
