// Address ranges and their mappings.
//
// - A reservation is PROT_NONE anonymous memory. A mapping puts a block's file pages over a part of it, still
//   PROT_NONE. Access is mprotect. Unmapping restores the anonymous PROT_NONE pages. So a lost page is a real fault.
// - One handle mapped twice is one file range mapped twice, so aliases are real.
// - The processor plays the device: this process may read or write a range as soon as any location may.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "sim/peers.h"
#include "sim/physical.h"

namespace ebbtide::sim {

using LocationKey = std::pair<int, int>;  // type, id

struct Mapping {
  uint64_t size;
  Block block;
  std::map<LocationKey, CUmemAccess_flags> access;
};

// What cuMemAlloc and its kin made: one reservation that is one mapping, sized as the caller asked.
struct LinearMemory {
  uint64_t requested_bytes;
  uint64_t context;
  bool is_managed = false;
};

struct Reservation {
  uint64_t size;
  std::optional<LinearMemory> linear;
};

// A part of a block, as a range of addresses sees it.
struct BlockRange {
  Block block;
  uint64_t offset;
  uint64_t size;
};

enum class AccessKind { kRead, kWrite };

class AddressSpace {
 public:
  CUresult reserve(uint64_t& address, uint64_t size, uint64_t alignment, uint64_t hint);
  CUresult free_range(uint64_t address, uint64_t size);
  CUresult map(uint64_t address, uint64_t size, const Block& block);
  CUresult unmap(uint64_t address, uint64_t size);
  CUresult set_access(uint64_t address, uint64_t size, const CUmemAccessDesc* descriptions, size_t count,
                      const Peers& peers);
  CUresult get_access(uint64_t& flags, LocationKey location, uint64_t address) const;

  // device: who may use it, beside the place where it lies.
  CUresult allocate_linear(uint64_t& address, const LinearMemory& linear, const Block& block, int device);
  CUresult free_linear(uint64_t address);
  void free_linear_of_context(uint64_t context);

  // The blocks behind a range, or nothing where a part of it is unmapped or forbidden to `device`.
  std::optional<std::vector<BlockRange>> resolve(uint64_t address, uint64_t size, AccessKind kind, int device) const;
  // The mapping and its start that hold this address.
  std::optional<std::pair<uint64_t, const Mapping*>> find_mapping(uint64_t address) const;
  std::optional<std::pair<uint64_t, const Reservation*>> find_reservation(uint64_t address) const;

  uint64_t reservation_count() const;
  uint64_t mapping_count() const;
  // Unmaps everything and gives every reservation back.
  void reset();

 private:
  using Mappings = std::map<uint64_t, Mapping>;

  using MappingRange = std::pair<Mappings::iterator, Mappings::iterator>;

  // The mappings within a reserved range; nothing where its ends cut one.
  std::optional<MappingRange> whole_mappings(uint64_t address, uint64_t size);
  // Whether the range lies in reservations; it may go on from one into the next.
  bool is_reserved(uint64_t address, uint64_t size) const;
  static CUresult check_descriptions(const MappingRange& range, const CUmemAccessDesc* descriptions, size_t count,
                                     const Peers& peers);
  uint64_t linear_count() const;
  bool overlaps_mapping(uint64_t address, uint64_t size) const;
  void drop_reservation(std::map<uint64_t, Reservation>::iterator reservation);

  std::map<uint64_t, Reservation> reservations_;
  Mappings mappings_;
};

}  // namespace ebbtide::sim
