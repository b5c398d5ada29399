#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <utility>

namespace ebbtide {

// Owns a file descriptor. One of exported memory holds the memory, in whatever process it is (csrc/DESIGN.md, F44).
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int file) noexcept : file_(file) {}
  Descriptor(Descriptor&& other) noexcept : file_(other.give()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  ~Descriptor() {
    if (file_ >= 0) ::close(file_);
  }
  explicit operator bool() const { return file_ >= 0; }
  int file() const { return file_; }
  int give() noexcept { return std::exchange(file_, -1); }
  // Another one of the same file. Empty where the process may open no more.
  static Descriptor copy_of(int file) noexcept { return Descriptor(::fcntl(file, F_DUPFD_CLOEXEC, 0)); }

 private:
  int file_ = -1;
};

}  // namespace ebbtide
