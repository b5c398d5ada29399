#pragma once

#include <cstddef>
#include <new>

namespace ebbtide {

// Owns memory that begins on a boundary of 4 KiB, as a file without page cache wants it; with unspecified content.
class AlignedBytes {
 public:
  explicit AlignedBytes(size_t size_bytes) : bytes_(static_cast<std::byte*>(::operator new(size_bytes, kAlignment))) {}
  AlignedBytes(const AlignedBytes&) = delete;
  AlignedBytes& operator=(const AlignedBytes&) = delete;
  ~AlignedBytes() { ::operator delete(bytes_, kAlignment); }
  std::byte* get() const { return bytes_; }

 private:
  static constexpr std::align_val_t kAlignment{4096};
  std::byte* bytes_;
};

}  // namespace ebbtide
