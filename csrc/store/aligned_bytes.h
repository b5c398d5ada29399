#pragma once

#include <cstddef>
#include <new>

namespace ebbtide {

// Owns memory aligned to 4 KiB, as files without page cache need it. Its content is unspecified.
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
