#pragma once

#include <cstdint>

// Which backups in RAM are pinned where they lie. Pure: numbers in, answer out. All in bytes.
namespace ebbtide::policy {

// Of a pause that writes to backups of this size. In a small one threads and a ring take longer than the bytes do, and
// pinning takes as long as one copy. A large one fills the bus through the ring.
bool is_small_pause(uint64_t backup_bytes);

// A backup is pinned as a whole or not at all: the driver refuses a copy that begins in pinned memory and ends beyond
// it (csrc/DESIGN.md, F28). So what it lacks of its memory is taken, up to this: what tensors leave free of torch's
// segments of 20 MiB, and some blocks of a larger one.
inline constexpr uint64_t kMostTakenBytes = uint64_t{32} << 20;

// By one pause, of what the host has free: an eighth, since it has yet to get its rings.
uint64_t takeable_bytes(uint64_t available_bytes);

// Whether a backup may be pinned beside what this process has pinned already: an eighth of the RAM that it may use.
bool has_room_to_pin(uint64_t size_bytes, uint64_t pinned_bytes, uint64_t ram_bytes);

}  // namespace ebbtide::policy
