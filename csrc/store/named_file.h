#pragma once

#include <string>
#include <utility>

// Files of backups that a folder shows: "ebbtide_backup_<process>_<random>_<number>". A process keeps its files locked
// (flock); its forked children close the descriptors. So a file that can be locked belongs to no living process, and
// the next process that makes a named file in the folder removes it, unless the file system has no such locks.
namespace ebbtide {

struct FileCalls;

// Owns the name of a file. The name goes with it, and at the exit of the process; in a forked child it stays.
class FileName {
 public:
  FileName() = default;
  explicit FileName(std::string path);
  FileName(FileName&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  FileName& operator=(FileName&& other) noexcept {
    std::swap(path_, other.path_);
    return *this;
  }
  ~FileName();

 private:
  std::string path_;
};

// Makes and opens a new file in the directory, for reading and writing. Returns its descriptor, or -1 with errno.
int open_named(const std::string& directory, const FileCalls& calls, FileName& name);

}  // namespace ebbtide
