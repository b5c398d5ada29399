#pragma once

#include "core/move/relocation.h"

namespace ebbtide {

// Whether one of these shares a handle with an allocation that is not among them.
bool is_any_shared(const Allocations& allocations);

// Where a named allocation shares a handle with one that is not named, each chunk of the handle gets a handle of its
// own, so that one can leave without the others.
//
// Handles are separated one after the other, the smallest first. Where the device has too little memory for one, it and
// the larger ones stay shared.
class Separation final : public Relocation {
 public:
  Separation(Core& core, const OperationRequest& request) : Relocation(core, request, Place::kDevice) {}
  OperationKind kind() const override { return OperationKind::kSeparate; }
  // Any allocation of the tags may share memory with the named ones.
  TagClaim claim() const override;
  void prepare(const Allocations& allocations) override;

 private:
  bool begin(int device, Batch& batch) override;
};

}  // namespace ebbtide
