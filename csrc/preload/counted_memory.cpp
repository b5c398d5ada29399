#include "preload/counted_memory.h"

namespace ebbtide::preload {

CountedMemory& counted_addresses() {
  static auto* const instance = new CountedMemory;
  return *instance;
}

CountedMemory& counted_handles() {
  static auto* const instance = new CountedMemory;
  return *instance;
}

}  // namespace ebbtide::preload
