// Address ranges and their mappings.
//
// - A reservation is anonymous memory with PROT_NONE. A mapping puts a block's file pages over a part of it, still with
//   PROT_NONE. Access is granted by mprotect. Unmapping restores the anonymous PROT_NONE pages, so an access to a lost
//   page is a real fault.
// - A handle that is mapped twice is one file range mapped twice, so the two mappings alias.
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

// Set if the reservation was made by cuMemAlloc or a similar call. Such a reservation is one mapping, with the size
// that the caller asked for.
struct LinearMemory {
  uint64_t requested_bytes;
  uint64_t context;
  bool is_managed = false;
};

struct Reservation {
  uint64_t size;
  std::optional<LinearMemory> linear;
  std::vector<Block> held{};  // was mapped here, and stays in use until the reservation goes (Quirk::kHeld)
};

// The part of a block that is behind a range of addresses.
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

  // `device` gets access, besides the location of the memory.
  CUresult allocate_linear(uint64_t& address, const LinearMemory& linear, const Block& block, int device);
  CUresult free_linear(uint64_t address);
  void free_linear_of_context(uint64_t context);

  // The blocks behind a range. Nothing if a part of it is unmapped or forbidden to `device`.
  std::optional<std::vector<BlockRange>> resolve(uint64_t address, uint64_t size, AccessKind kind, int device) const;
  // The mapping that contains this address, with its start.
  std::optional<std::pair<uint64_t, const Mapping*>> find_mapping(uint64_t address) const;
  std::optional<std::pair<uint64_t, const Reservation*>> find_reservation(uint64_t address) const;

  uint64_t reservation_count() const;
  uint64_t mapping_count() const;
  // Unmaps everything and frees every reservation.
  void reset();

 private:
  using Mappings = std::map<uint64_t, Mapping>;

  using MappingRange = std::pair<Mappings::iterator, Mappings::iterator>;

  // The mappings within a reserved range. Nothing if an end of the range cuts a mapping.
  std::optional<MappingRange> whole_mappings(uint64_t address, uint64_t size);
  // Whether the range lies in reservations. It may continue from one into the next.
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
