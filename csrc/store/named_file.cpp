#include "store/named_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <set>

#include "base/fork.h"
#include "base/scope_exit.h"
#include "store/backup_file.h"

namespace ebbtide {
namespace {

constexpr size_t kRandomDigits = 16;

// Leaked on purpose, as all state of the core: files go after static destructors have run, too.
struct NamedFiles {
  const pid_t process = ::getpid();
  const uint64_t random = [] {
    std::random_device source;
    return (static_cast<uint64_t>(source()) << 32) ^ source();
  }();
  std::mutex mutex;
  std::set<std::string> living;  // paths
  std::set<std::string> swept;   // directories
  uint64_t last_number = 0;
};

void remove_all() noexcept;

NamedFiles& named_files() {
  static auto* const instance = [] {
    auto* const made = new NamedFiles;
    std::atexit(&remove_all);
    return made;
  }();
  return *instance;
}

bool is_own_process() { return ::getpid() == named_files().process; }

void remove_all() noexcept {
  if (!is_own_process()) return;
  NamedFiles& files = named_files();
  std::set<std::string> living;
  {
    const std::lock_guard lock(files.mutex);
    living.swap(files.living);
  }
  for (const std::string& path : living) ::unlink(path.c_str());
}

// A name that next_path() makes, and nothing that a user would.
bool is_ours(const std::string& name) {
  std::array<char, kRandomDigits + 1> random{};
  int end = 0;
  std::sscanf(name.c_str(), "ebbtide_backup_%*[0-9]_%16[0-9a-f]_%*[0-9]%n", random.data(), &end);
  return static_cast<size_t>(end) == name.size() && std::strlen(random.data()) == kRandomDigits;
}

std::string next_path(const std::string& directory) {
  NamedFiles& files = named_files();
  const std::lock_guard lock(files.mutex);
  std::array<char, 128> name{};
  std::snprintf(name.data(), name.size(), "/ebbtide_backup_%d_%016llx_%llu", files.process,
                static_cast<unsigned long long>(files.random), static_cast<unsigned long long>(++files.last_number));
  return directory + name.data();
}

bool has_name(int file) {
  struct stat info{};
  return ::fstat(file, &info) == 0 && info.st_nlink > 0;
}

// Removes it if no process has it locked.
void sweep_file(int directory, const char* name) {
  const int file = ::openat(directory, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) return;
  const ScopeExit close([&]() noexcept { ::close(file); });
  struct stat info{};
  if (::fstat(file, &info) != 0 || !S_ISREG(info.st_mode) || info.st_uid != ::geteuid()) return;
  if (::flock(file, LOCK_EX | LOCK_NB) == 0) ::unlinkat(directory, name, 0);
}

// Once for each directory: removes files of ended processes.
void sweep(const std::string& directory) {
  {
    NamedFiles& files = named_files();
    const std::lock_guard lock(files.mutex);
    if (!files.swept.insert(directory).second) return;
  }
  DIR* const listing = ::opendir(directory.c_str());
  if (listing == nullptr) return;
  const ScopeExit close([&]() noexcept { ::closedir(listing); });
  while (const dirent* const entry = ::readdir(listing)) {
    if (is_ours(entry->d_name)) sweep_file(::dirfd(listing), entry->d_name);
  }
}

}  // namespace

FileName::FileName(std::string path) : path_(std::move(path)) {
  NamedFiles& files = named_files();
  const std::lock_guard lock(files.mutex);
  files.living.insert(path_);
}

FileName::~FileName() {
  if (path_.empty() || !is_own_process()) return;
  if (::unlink(path_.c_str()) != 0 && errno != ENOENT) return;  // the exit tries again
  NamedFiles& files = named_files();
  const std::lock_guard lock(files.mutex);
  files.living.erase(path_);
}

int open_named(const std::string& directory, const FileCalls& calls, FileName& name) {
  constexpr int kTries = 100;
  sweep(directory);
  for (int tries = 0; tries < kTries; ++tries) {
    const std::string path = next_path(directory);
    const int file = PrivateFiles::instance().open(
        [&] { return calls.open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600); });
    if (file < 0 && errno == EEXIST) continue;
    if (file < 0) return file;
    name = FileName(path);
    // Until it was locked, another process may have taken it for a file of an ended process.
    if ((::flock(file, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) && has_name(file)) return file;
    PrivateFiles::instance().close(file, [&] { calls.close(file); });
  }
  errno = EEXIST;
  return -1;
}

}  // namespace ebbtide
