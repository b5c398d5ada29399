#include "store/memory_backup.h"

#include <cstring>

namespace ebbtide {

void MemoryBackup::read(size_t offset, std::byte* bytes, size_t size_bytes) const {
  // It may stay in the cache: the copy engine reads it next.
  std::memcpy(bytes, memory_.bytes() + offset, size_bytes);
}

}  // namespace ebbtide
