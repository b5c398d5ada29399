#pragma once

#include "store/store.h"

namespace ebbtide {

// Anonymous memory as in the ram store, pinned as a whole: the copy engine reaches it without the staging ring. Kept for as long as the backup lives and written in place, since pinning costs as much as a copy.
//
// seal() pins: a context of the driver is current in the calling thread, and no capture is under way (cuMemHostRegister breaks one). The destructor unpins, in any thread; a capture is the owner's care there too.
class PinnedStore : public Store {
 public:
  std::unique_ptr<Backup> open(size_t size_bytes) override;
};

}  // namespace ebbtide
