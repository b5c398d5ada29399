#include "store/named_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <set>
#include <string_view>

#include "base/private_files.h"
#include "base/scope_exit.h"
#include "store/backup_file.h"

namespace ebbtide {
namespace {

constexpr std::string_view kPrefix = "ebbtide_backup_";
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

size_t count_of(std::string_view text, std::string_view digits) {
  return std::min(text.find_first_not_of(digits), text.size());
}

// A name that next_path() makes, and nothing that a user would.
bool is_ours(std::string_view name) {
  if (!name.starts_with(kPrefix)) return false;
  name.remove_prefix(kPrefix.size());
  const size_t process_digits = count_of(name, "0123456789");
  if (process_digits == 0 || name.substr(process_digits, 1) != "_") return false;
  name.remove_prefix(process_digits + 1);
  if (count_of(name, "0123456789abcdef") != kRandomDigits || name.substr(kRandomDigits, 1) != "_") return false;
  name.remove_prefix(kRandomDigits + 1);
  return !name.empty() && count_of(name, "0123456789") == name.size();
}

std::string next_path(const std::string& directory) {
  NamedFiles& files = named_files();
  const std::lock_guard lock(files.mutex);
  std::array<char, kRandomDigits + 1> random{};
  std::snprintf(random.data(), random.size(), "%016llx", static_cast<unsigned long long>(files.random));
  return directory + "/" + std::string(kPrefix) + std::to_string(files.process) + "_" + random.data() + "_" +
         std::to_string(++files.last_number);
}

bool has_name(int file) {
  struct stat info{};
  return ::fstat(file, &info) == 0 && info.st_nlink > 0;
}

// Removes it if nobody has it locked.
void sweep_file(int directory, const char* name) {
  const int file = ::openat(directory, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) return;
  const ScopeExit close([&]() noexcept { ::close(file); });
  struct stat info{};
  if (::fstat(file, &info) != 0 || !S_ISREG(info.st_mode) || info.st_uid != ::geteuid()) return;
  if (::flock(file, LOCK_EX | LOCK_NB) == 0) ::unlinkat(directory, name, 0);
}

// Once for each directory: what processes left there that are gone.
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
    // Another process may have taken it for one that nobody has, until it was locked.
    if ((::flock(file, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) && has_name(file)) return file;
    PrivateFiles::instance().close(file, [&] { calls.close(file); });
  }
  errno = EEXIST;
  return -1;
}

}  // namespace ebbtide
