#pragma once

#include <cstddef>
#include <span>

#include "store/anonymous_memory.h"
#include "store/store.h"

namespace ebbtide {

// Takes all of this memory with several threads. Throws StoreError if the system has none to give.
void populate(const AnonymousMemory& memory, int threads);

// Takes the memory of these backups, sizes[i] bytes of backups[i], with several threads (fewer if the system starts no
// more; one means the calling thread alone). Then seals them one after another in the calling thread, where seal()'s
// conditions must hold. The first error is thrown after all threads have ended; some backups are then populated and
// sealed, and others are not.
void populate_all(std::span<Backup* const> backups, std::span<const size_t> sizes, int threads);

}  // namespace ebbtide
