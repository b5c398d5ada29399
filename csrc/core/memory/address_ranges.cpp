#include "core/memory/address_ranges.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"

namespace ebbtide {
namespace {

bool is_before(const AddressRange& one, const AddressRange& other) { return one.address < other.address; }

}  // namespace

AddressRanges::AddressRanges(std::vector<AddressRange> ranges) : ranges_(std::move(ranges)) {
  std::sort(ranges_.begin(), ranges_.end(), is_before);
  require_apart();
}

AddressRanges::AddressRanges(const AddressRanges& one, const AddressRanges& other) {
  ranges_.reserve(one.ranges_.size() + other.ranges_.size());
  std::merge(one.ranges_.begin(), one.ranges_.end(), other.ranges_.begin(), other.ranges_.end(),
             std::back_inserter(ranges_), is_before);
  require_apart();
}

void AddressRanges::require_apart() const {
  for (size_t index = 1; index < ranges_.size(); ++index) {
    if (ranges_[index - 1].end() > ranges_[index].address) throw InvalidArgument("unused ranges overlap");
  }
}

std::vector<bool> AddressRanges::covered_blocks(const AddressRange& of, size_t block_bytes) const {
  std::vector<bool> is_covered(of.size_bytes / block_bytes, false);
  auto range = std::upper_bound(ranges_.begin(), ranges_.end(), of.address,
                                [](CUdeviceptr at, const AddressRange& other) { return at < other.end(); });
  for (; range != ranges_.end() && range->address < of.end(); ++range) {
    const size_t to = std::min(range->end(), of.end()) - of.address;
    size_t offset = round_up(std::max(range->address, of.address) - of.address, block_bytes);
    for (; offset + block_bytes <= to; offset += block_bytes) is_covered[offset / block_bytes] = true;
  }
  return is_covered;
}

}  // namespace ebbtide
