#pragma once

#include <cstdint>

// Which backups in RAM are pinned where they lie. Pure: numbers in, answer out. All in bytes.
namespace ebbtide::policy {

// A backup that is kept from one pause to the next, at the second of them.
struct KeptBackup {
  uint64_t size_bytes = 0;   // of the whole backup, which is pinned as a whole
  uint64_t pause_bytes = 0;  // of all backups that this pause writes to
};

struct PinnedShare {
  uint64_t pinned_bytes = 0;  // all that this process has pinned, without the backup
  uint64_t ram_bytes = 0;     // that it may use
};

// Small ones are worth it: threads and a ring take longer than their bytes, and pinning takes as long as one copy. A
// large pause fills the bus through the ring. Not beyond an eighth of the RAM.
bool is_worth_pinning(const KeptBackup& kept, const PinnedShare& share);

}  // namespace ebbtide::policy
