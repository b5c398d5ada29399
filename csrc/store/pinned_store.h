#pragma once

#include "store/store.h"

namespace ebbtide {

// Anonymous memory as in the RAM store, pinned as a whole: the copy engine accesses it without the staging ring. It is
// kept for the life of the backup and rewritten in place, since pinning costs as much as a copy.
//
// seal() pins. It needs a current context in the calling thread and no capture under way (cuMemHostRegister breaks
// one). The destructor unpins, in any thread; its caller makes sure that no capture is under way.
class PinnedStore : public Store {
 public:
  std::unique_ptr<Backup> open(size_t size_bytes) override;
};

}  // namespace ebbtide
