#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include "store/store.h"

namespace ebbtide {

using PopulateRange = std::function<void(size_t offset, size_t size_bytes)>;

// Calls each function for its range [0, size), cut into pieces, in several threads (fewer if the system starts no more;
// one means the calling thread alone). The first error is thrown after all threads have ended.
void populate_ranges(const std::vector<std::pair<PopulateRange, size_t>>& ranges, int threads);

// Takes the memory of these backups, which have these sizes, likewise. Then seals them one after another in the calling
// thread, where seal()'s conditions must hold. After an error some backups are populated and sealed, and others are
// not.
void populate_all(const std::vector<std::pair<Backup*, size_t>>& backups, int threads);

}  // namespace ebbtide
