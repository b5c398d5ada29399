#pragma once

#include <cuda.h>

#include <cstddef>
#include <vector>

namespace ebbtide {

// A part of the address space.
struct AddressRange {
  CUdeviceptr address = 0;
  size_t size_bytes = 0;
  CUdeviceptr end() const { return address + size_bytes; }
};

// Ranges by address, of which no two overlap: sorted and checked where they are made, and nowhere else.
class AddressRanges {
 public:
  AddressRanges() = default;
  // Throws InvalidArgument where two of them overlap.
  explicit AddressRanges(std::vector<AddressRange> ranges);
  // The ranges of both. Throws InvalidArgument where one overlaps one of the other's.
  AddressRanges(const AddressRanges& one, const AddressRanges& other);

  bool empty() const { return ranges_.empty(); }
  void clear() { ranges_.clear(); }
  const std::vector<AddressRange>& all() const { return ranges_; }
  // By block of the given size from this range's beginning: whether it lies whole in one of the ranges.
  std::vector<bool> covered_blocks(const AddressRange& of, size_t block_bytes) const;

 private:
  void require_apart() const;
  std::vector<AddressRange> ranges_;
};

}  // namespace ebbtide
