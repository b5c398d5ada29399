#pragma once

#include "vmm/deferred_undos.h"

namespace ebbtide {

// Owns a range of virtual addresses, without memory: the driver's, or, on HIP, one that the process holds itself. All
// mappings in it must be undone before it is destroyed.
class Reservation : public Owner<Undo> {
 public:
  Reservation() = default;
  // size_bytes: a multiple of the granularity.
  static Reservation reserve(size_t size_bytes);

  CUdeviceptr address() const { return object_.object; }
  size_t size_bytes() const { return object_.size_bytes; }

 private:
  using Owner::Owner;
};

}  // namespace ebbtide
