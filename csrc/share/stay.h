#pragma once

#include <memory>

#include "core/state/core.h"

namespace ebbtide {

// One allocation that stays where it is for as long as this lives: it holds the tag, as an operation does.
class Stay {
 public:
  // Waits while an operation has the tag, or throws BusyError. Throws InvalidArgument where the address is in no
  // allocation, StateError where a part of it is not in device memory.
  Stay(Core& core, CUdeviceptr address, bool may_wait);
  Stay(const Stay&) = delete;
  Stay& operator=(const Stay&) = delete;
  ~Stay();

  const std::shared_ptr<Allocation>& allocation() const { return allocation_; }

 private:
  void let_go() noexcept;

  Core& core_;
  const uint64_t peer_generation_;
  Selection selection_;
  std::shared_ptr<Allocation> allocation_;
};

}  // namespace ebbtide
