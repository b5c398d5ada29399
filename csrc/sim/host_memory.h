// Pinned host memory: the blocks of cuMemHostAlloc and the ranges of cuMemHostRegister.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <optional>
#include <utility>

namespace ebbtide::sim {

constexpr uint64_t kPage = 4096;

inline uint64_t round_to_pages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

struct PinnedRange {
  uint64_t size;
  uint64_t context;
  bool is_registered;
};

class HostMemory {
 public:
  CUresult allocate(uint64_t& address, uint64_t size, uint64_t context);
  CUresult free_block(uint64_t address);
  CUresult register_range(uint64_t address, uint64_t size, uint64_t context);
  CUresult unregister_range(uint64_t address);
  void free_of_context(uint64_t context);

  // The pinned range that contains this address, with its start.
  std::optional<std::pair<uint64_t, PinnedRange>> find(uint64_t address) const;
  // Whether one pinned range contains all of this range.
  bool holds(uint64_t address, uint64_t size) const;
  // Whether this range begins in a registered range and ends beyond it.
  bool leaves_registered(uint64_t address, uint64_t size) const;

  uint64_t allocated_count() const;
  uint64_t allocated_bytes() const;
  uint64_t registered_count() const { return ranges_.size() - allocated_count(); }
  void reset();

 private:
  std::map<uint64_t, PinnedRange> ranges_;
};

}  // namespace ebbtide::sim
