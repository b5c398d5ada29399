#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

// Which parts of slabs of memory are taken. Addresses are numbers here: no memory is touched.
namespace ebbtide::policy {

class SlabSpace {
 public:
  // Adds a slab, which is free. It overlaps no other one. Throws std::bad_alloc.
  void add(uint64_t slab, uint64_t size_bytes);
  // Takes the front of the smallest free range that has room. The size is taken as it is: pieces begin on multiples of
  // the caller's alignment if all sizes and slabs are multiples of it. Throws std::bad_alloc.
  std::optional<uint64_t> take(uint64_t size_bytes);
  // Gives a piece back by its first address. False if none begins there.
  bool give_back(uint64_t piece) noexcept;
  // The piece that holds this address stays taken for ever, also after it was given back. False if there is none.
  bool keep_for_good(uint64_t address) noexcept;
  // A slab of which nothing is taken, if there is one.
  std::optional<uint64_t> find_free_slab() const noexcept;
  // Removes a slab of which nothing is taken.
  void remove(uint64_t slab) noexcept;

  uint64_t held_bytes() const { return held_bytes_; }
  uint64_t used_bytes() const { return used_bytes_; }

 private:
  using FreeRanges = std::set<std::pair<uint64_t, uint64_t>>;  // size and address
  enum class State { kFree, kTaken, kKept, kKeptAndGivenBack };
  struct Range {
    uint64_t size_bytes;
    uint64_t slab;
    State state;
    FreeRanges::node_type entry;  // of a taken range: what it becomes again, so that giving it back takes no memory
  };
  using Ranges = std::map<uint64_t, Range>;
  void make_free(Ranges::iterator range) noexcept;

  Ranges ranges_;  // every byte of every slab lies in one
  FreeRanges free_;
  std::map<uint64_t, uint64_t> slabs_;  // and their sizes
  uint64_t held_bytes_ = 0;
  uint64_t used_bytes_ = 0;
};

}  // namespace ebbtide::policy
