#pragma once

#include <cstddef>

namespace ebbtide {

// Owns a range of anonymous memory, aligned to a huge page and in huge pages if the system has them. Pages are taken at
// first touch.
class AnonymousMemory {
 public:
  // Throws StoreError if the system has no address space left.
  static AnonymousMemory map(size_t size_bytes);
  AnonymousMemory(AnonymousMemory&& other) noexcept;
  AnonymousMemory& operator=(AnonymousMemory&&) = delete;
  ~AnonymousMemory();

  std::byte* bytes() const { return bytes_; }
  size_t size_bytes() const { return size_bytes_; }

  // Takes the pages of this range and keeps their content. Throws StoreError if the system has none to give.
  void populate(size_t offset, size_t range_bytes) const;
  // Gives back the pages that lie wholly in this range; they read as zeros then.
  void discard(size_t offset, size_t range_bytes) const noexcept;

  // Gives up the ownership, for a caller that must keep the memory mapped: the caller unmaps it with these two numbers.
  struct Range {
    void* mapping;
    size_t mapping_bytes;
  };
  Range release() noexcept;

 private:
  AnonymousMemory(void* mapping, size_t mapping_bytes, std::byte* bytes, size_t size_bytes)
      : mapping_(mapping), mapping_bytes_(mapping_bytes), bytes_(bytes), size_bytes_(size_bytes) {}
  void* mapping_;
  size_t mapping_bytes_;
  std::byte* bytes_;
  size_t size_bytes_;
};

}  // namespace ebbtide
