#include "sim/address_space.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <iterator>

#include "sim/quirks.h"

namespace ebbtide::sim {
namespace {

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

constexpr int kNothing = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

// Reserves at `hint` if that is free, else anywhere. Returns 0 if there is no room.
uint64_t reserve_pages(uint64_t size, uint64_t alignment, uint64_t hint) {
  if (hint != 0 && hint % alignment == 0) {
    void* at_hint = mmap(pointer(hint), size, PROT_NONE, kNothing | MAP_FIXED_NOREPLACE, -1, 0);
    if (at_hint == pointer(hint)) return hint;
    if (at_hint != MAP_FAILED) munmap(at_hint, size);
  }
  const uint64_t padded = size + alignment;
  if (padded < size) return 0;
  void* start = mmap(nullptr, padded, PROT_NONE, kNothing, -1, 0);
  if (start == MAP_FAILED) return 0;
  const uint64_t begin = reinterpret_cast<uint64_t>(start);
  const uint64_t aligned = (begin + alignment - 1) / alignment * alignment;
  if (aligned != begin) munmap(start, aligned - begin);
  munmap(pointer(aligned + size), begin + padded - (aligned + size));
  return aligned;
}

int protection_of(const std::map<LocationKey, CUmemAccess_flags>& access) {
  int protection = PROT_NONE;
  for (const auto& [location, flags] : access) {
    if (flags == CU_MEM_ACCESS_FLAGS_PROT_READ) protection |= PROT_READ;
    if (flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) protection |= PROT_READ | PROT_WRITE;
  }
  return protection;
}

// Devices may access all memory. The host may access host memory only.
bool may_be_accessed_by(const PhysicalBlock& block, const CUmemLocation& location) {
  return location.type == CU_MEM_LOCATION_TYPE_DEVICE || !block.is_on_device();
}

bool map_block(uint64_t address, uint64_t size, const PhysicalBlock& block, int protection) {
  return mmap(pointer(address), size, protection, MAP_SHARED | MAP_FIXED, block.backing->fd,
              static_cast<off_t>(block.offset)) != MAP_FAILED;
}

}  // namespace

CUresult AddressSpace::reserve(uint64_t& address, uint64_t size, uint64_t alignment, uint64_t hint) {
  if (alignment == 0) alignment = kGranularity;
  if (size == 0 || size % kGranularity != 0 || !std::has_single_bit(alignment)) return CUDA_ERROR_INVALID_VALUE;
  address = reserve_pages(size, std::max(alignment, kGranularity), hint);
  if (address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  reservations_[address] = {.size = size, .linear = std::nullopt};
  return CUDA_SUCCESS;
}

CUresult AddressSpace::free_range(uint64_t address, uint64_t size) {
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second.size != size || found->second.linear) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (overlaps_mapping(address, size)) return CUDA_ERROR_INVALID_VALUE;
  drop_reservation(found);
  return CUDA_SUCCESS;
}

void AddressSpace::drop_reservation(std::map<uint64_t, Reservation>::iterator reservation) {
  munmap(pointer(reservation->first), reservation->second.size);
  reservations_.erase(reservation);
}

std::optional<std::pair<uint64_t, const Reservation*>> AddressSpace::find_reservation(uint64_t address) const {
  auto next = reservations_.upper_bound(address);
  if (next == reservations_.begin()) return std::nullopt;
  --next;
  if (address - next->first >= next->second.size) return std::nullopt;
  return std::pair(next->first, &next->second);
}

std::optional<std::pair<uint64_t, const Mapping*>> AddressSpace::find_mapping(uint64_t address) const {
  auto next = mappings_.upper_bound(address);
  if (next == mappings_.begin()) return std::nullopt;
  --next;
  if (address - next->first >= next->second.size) return std::nullopt;
  return std::pair(next->first, &next->second);
}

bool AddressSpace::overlaps_mapping(uint64_t address, uint64_t size) const {
  if (find_mapping(address)) return true;
  const auto next = mappings_.lower_bound(address);
  return next != mappings_.end() && next->first - address < size;
}

bool AddressSpace::is_reserved(uint64_t address, uint64_t size) const {
  while (size > 0) {
    const auto reservation = find_reservation(address);
    if (!reservation || reservation->second->linear) return false;
    const uint64_t part = std::min(size, reservation->second->size - (address - reservation->first));
    address += part;
    size -= part;
  }
  return true;
}

CUresult AddressSpace::map(uint64_t address, uint64_t size, const Block& block) {
  if (block == nullptr || size == 0 || address % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
  if (size != block->size) return CUDA_ERROR_NOT_SUPPORTED;
  if (!is_reserved(address, size)) return CUDA_ERROR_INVALID_VALUE;
  if (overlaps_mapping(address, size)) return CUDA_ERROR_INVALID_VALUE;
  if (!map_block(address, size, *block, PROT_NONE)) return CUDA_ERROR_OUT_OF_MEMORY;
  mappings_[address] = {.size = size, .block = block, .access = {}};
  return CUDA_SUCCESS;
}

std::optional<AddressSpace::MappingRange> AddressSpace::whole_mappings(uint64_t address, uint64_t size) {
  if (size == 0 || size % kGranularity != 0 || address % kGranularity != 0) return std::nullopt;
  if (!is_reserved(address, size)) return std::nullopt;
  const auto first = mappings_.lower_bound(address), last = mappings_.lower_bound(address + size);
  const auto cut_at_start = find_mapping(address), cut_at_end = find_mapping(address + size);
  if (cut_at_start && cut_at_start->first != address) return std::nullopt;
  if (cut_at_end && cut_at_end->first != address + size) return std::nullopt;
  return std::pair(first, last);
}

CUresult AddressSpace::unmap(uint64_t address, uint64_t size) {
  const auto found = whole_mappings(address, size);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  if (mmap(pointer(address), size, PROT_NONE, kNothing | MAP_FIXED, -1, 0) == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  for (auto mapping = found->first; has(Quirk::kHeld) && mapping != found->second; ++mapping)
    std::prev(reservations_.upper_bound(mapping->first))->second.held.push_back(mapping->second.block);
  mappings_.erase(found->first, found->second);
  return CUDA_SUCCESS;
}

CUresult AddressSpace::check_descriptions(const MappingRange& range, const CUmemAccessDesc* descriptions, size_t count,
                                          const Peers& peers) {
  for (size_t i = 0; i < count; ++i) {
    const CUmemAccess_flags flags = descriptions[i].flags;
    if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
        flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    for (auto mapping = range.first; mapping != range.second; ++mapping) {
      const PhysicalBlock& block = *mapping->second.block;
      const CUmemLocation& location = descriptions[i].location;
      if (!may_be_accessed_by(block, location)) return CUDA_ERROR_NOT_SUPPORTED;
      const bool is_other = block.is_on_device() && block.location.id != location.id;
      if (is_other && !peers.reaches(location.id, block.location.id)) return CUDA_ERROR_INVALID_DEVICE;
    }
  }
  return CUDA_SUCCESS;
}

CUresult AddressSpace::set_access(uint64_t address, uint64_t size, const CUmemAccessDesc* descriptions, size_t count,
                                  const Peers& peers) {
  if (descriptions == nullptr || count == 0) return CUDA_ERROR_INVALID_VALUE;
  // As in the driver: both ends must be mapped. Mappings behind a hole keep their access, without an error.
  const auto range = whole_mappings(address, size);
  if (!range || !find_mapping(address) || !find_mapping(address + size - 1)) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult wrong = check_descriptions(*range, descriptions, count, peers); wrong != CUDA_SUCCESS)
    return wrong;
  for (auto mapping = range->first; mapping != range->second && mapping->first == address; ++mapping) {
    auto access = mapping->second.access;
    for (size_t i = 0; i < count; ++i) {
      access[{descriptions[i].location.type, descriptions[i].location.id}] = descriptions[i].flags;
    }
    if (mprotect(pointer(mapping->first), mapping->second.size, protection_of(access)) != 0) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    mapping->second.access = std::move(access);
    address += mapping->second.size;
  }
  return CUDA_SUCCESS;
}

CUresult AddressSpace::get_access(uint64_t& flags, LocationKey location, uint64_t address) const {
  const auto mapping = find_mapping(address);
  if (!mapping) return CUDA_ERROR_INVALID_VALUE;
  const auto& access = mapping->second->access;
  const auto found = access.find(location);
  flags = found == access.end() ? CU_MEM_ACCESS_FLAGS_PROT_NONE : found->second;
  return CUDA_SUCCESS;
}

CUresult AddressSpace::allocate_linear(uint64_t& address, const LinearMemory& linear, const Block& block, int device) {
  address = reserve_pages(block->size, kGranularity, 0);
  if (address == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  if (!map_block(address, block->size, *block, PROT_READ | PROT_WRITE)) {
    munmap(pointer(address), block->size);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  reservations_[address] = {.size = block->size, .linear = linear};
  const LocationKey own{block->location.type, block->location.id};
  const LocationKey user{CU_MEM_LOCATION_TYPE_DEVICE, device};
  mappings_[address] = {
      .size = block->size,
      .block = block,
      .access = {{own, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}, {user, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}}};
  return CUDA_SUCCESS;
}

CUresult AddressSpace::free_linear(uint64_t address) {
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || !found->second.linear) return CUDA_ERROR_INVALID_VALUE;
  mappings_.erase(address);
  drop_reservation(found);
  return CUDA_SUCCESS;
}

void AddressSpace::free_linear_of_context(uint64_t context) {
  for (auto next = reservations_.begin(); next != reservations_.end();) {
    const auto current = next++;
    if (current->second.linear && current->second.linear->context == context) free_linear(current->first);
  }
}

std::optional<std::vector<BlockRange>> AddressSpace::resolve(uint64_t address, uint64_t size, AccessKind kind,
                                                             int device) const {
  std::vector<BlockRange> ranges;
  while (size > 0) {
    const auto mapping = find_mapping(address);
    if (!mapping) return std::nullopt;
    const auto& [start, found] = *mapping;
    const auto access = found->access.find({CU_MEM_LOCATION_TYPE_DEVICE, device});
    if (access == found->access.end() || access->second == CU_MEM_ACCESS_FLAGS_PROT_NONE) return std::nullopt;
    if (kind == AccessKind::kWrite && access->second == CU_MEM_ACCESS_FLAGS_PROT_READ) return std::nullopt;
    const uint64_t offset = address - start;
    const uint64_t part = std::min(size, found->size - offset);
    ranges.push_back({found->block, found->block->offset + offset, part});
    address += part;
    size -= part;
  }
  return ranges;
}

uint64_t AddressSpace::linear_count() const {
  return static_cast<uint64_t>(std::count_if(reservations_.begin(), reservations_.end(), [](const auto& reservation) {
    return reservation.second.linear.has_value();
  }));
}

// Memory of cuMemAlloc counts neither as a reservation nor as a mapping.
uint64_t AddressSpace::reservation_count() const { return reservations_.size() - linear_count(); }
uint64_t AddressSpace::mapping_count() const { return mappings_.size() - linear_count(); }

void AddressSpace::reset() {
  mappings_.clear();
  while (!reservations_.empty()) drop_reservation(reservations_.begin());
}

}  // namespace ebbtide::sim
