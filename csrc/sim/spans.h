// Ranges of memory as the simulator reads and writes them. If a block backs the range, it uses pread and pwrite, so
// that a bad address does not end the process.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "sim/address_space.h"
#include "sim/lock.h"

namespace ebbtide::sim {

// A piece of a block, or of this process's memory if `block` is null.
struct Span {
  Block block;
  uint64_t position;
  uint64_t size;
};
using Spans = std::vector<Span>;

// An address in a caller's argument. A host address may be any memory of the process; a device address is simulated or
// pinned memory.
struct Address {
  uint64_t value;
  bool is_device;
  // Set for a copy, which can access cuMemAlloc's memory on any device. A kernel and a fill need enabled peer access.
  bool is_copied = false;
};

// Nothing if the range may not be used this way at the moment.
std::optional<Spans> resolve(Lock&, const Address& address, uint64_t size, AccessKind kind, int device);

// A number that streams, kernels and the processor pass to each other. Empty, or false, if the address is no longer
// valid.
std::optional<uint32_t> read_number(Lock&, uint64_t address, int device);
bool write_number(Lock&, uint64_t address, uint32_t value, int device);

// These need no lock, because the spans hold their blocks. False if memory cannot be read or written.
bool move_piece(const Span& to, const Span& from);
bool move_bytes(const Spans& to, const Spans& from, uint64_t size);

}  // namespace ebbtide::sim
