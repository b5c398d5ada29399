#pragma once

#include <stdlib.h>

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "store/aligned_bytes.h"
#include "store/disk_store.h"

// Helpers for the tests of the stores: a directory for files, and bytes that repeat nowhere.
namespace ebbtide::testing {

// An empty directory for the disk store. It is on a disk, because /tmp may be in RAM.
class DiskDirectory {
 public:
  DiskDirectory() {
    std::string name = "/var/tmp/ebbtide-test-XXXXXX";
    path_ = ::mkdtemp(name.data());
    set_disk_directory(path_);
  }
  DiskDirectory(const DiskDirectory&) = delete;
  DiskDirectory& operator=(const DiskDirectory&) = delete;
  ~DiskDirectory() {
    set_disk_directory("");
    std::filesystem::remove_all(path_);
  }
  const std::string& path() const { return path_; }
  bool is_empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::string path_;
};

// Opens disk backups through these calls.
struct DiskStore {
  const FileCalls& calls = kSystemFileCalls;
  std::unique_ptr<Backup> open(size_t size_bytes) const { return open_disk_backup(size_bytes, calls); }
};

inline std::vector<std::byte> random_bytes(size_t size_bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(size_bytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() >> 11);
  return bytes;
}

// These pass the bytes through aligned memory, as a store asks for.
inline void write_at(Backup& backup, size_t offset, const std::byte* bytes, size_t size_bytes) {
  const AlignedBytes aligned(size_bytes);
  std::memcpy(aligned.get(), bytes, size_bytes);
  backup.write(offset, aligned.get(), size_bytes);
}
inline void write_all(Backup& backup, const std::vector<std::byte>& bytes) {
  write_at(backup, 0, bytes.data(), bytes.size());
}
inline std::vector<std::byte> read_at(const Backup& backup, size_t offset, size_t size_bytes) {
  const AlignedBytes aligned(size_bytes);
  backup.read(offset, aligned.get(), size_bytes);
  return {aligned.get(), aligned.get() + size_bytes};
}
inline std::vector<std::byte> read_all(const Backup& backup, size_t size_bytes) {
  return read_at(backup, 0, size_bytes);
}

}  // namespace ebbtide::testing
