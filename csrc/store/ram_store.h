#pragma once

#include "store/store.h"

namespace ebbtide {

// Anonymous memory, in huge pages if the system has them. Nothing is pinned, but for backups of which try_pin() is
// asked. The memory is returned to the system with the backup; where it is pinned, what pinned_store.h says of the end
// holds.
class RamStore : public Store {
 public:
  std::unique_ptr<Backup> open(size_t size_bytes) override;
};

}  // namespace ebbtide
