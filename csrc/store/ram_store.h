#pragma once

#include "store/store.h"

namespace ebbtide {

// Anonymous memory, in huge pages if the system has them. Nothing is pinned. The memory is returned to the system with
// the backup.
class RamStore : public Store {
 public:
  std::unique_ptr<Backup> open(size_t size_bytes) override;
};

}  // namespace ebbtide
