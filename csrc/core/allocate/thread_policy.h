#pragma once

#include <array>
#include <cstdint>

#include "base/tag.h"
#include "core/memory/backup_record.h"

// The tag that the hooks of the preload library give to a thread's allocations.
namespace ebbtide {

// kUnset: as the program's own policy says.
enum class Tagging { kUnset, kOff, kOn };

// Without pointers and destructors, because each thread has one.
struct ThreadPolicy {
  Tagging tagging = Tagging::kUnset;
  BackupKind backup = BackupKind::kRam;
  bool retain = false;
  // Not 0: the policy counts as long as this lease is open. The lease of a region may be closed by another thread,
  // which cannot change this thread's policy.
  uint64_t lease = 0;
  std::array<char, kTagBytesMax + 1> tag{};  // ends with NUL; empty only where nothing is tagged
};

// The calling thread's policy; unset where its lease was closed.
ThreadPolicy thread_policy();
// Throws InvalidArgument for a malformed tag.
void set_thread_policy(const ThreadPolicy& policy);

// The policy of threads without one of their own. Unset in a process without the preload library, whose definition
// replaces this weak one.
ThreadPolicy program_policy();

}  // namespace ebbtide
