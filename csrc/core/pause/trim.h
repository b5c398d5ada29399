#pragma once

#include "core/pause/removal.h"

namespace ebbtide {

// Drops the content of allocations that are not in use, without a pause of their tag. They come back only where a
// resume names their address.
class Trim final : public Removal {
 public:
  Trim(Core& core, const OperationRequest& request) : Removal(core, request, OperationKind::kTrim) {}
  TagClaim claim() const override;
  void prepare(const Allocations& allocations) override;
  void run_device(int /*device*/) override {}
  void run_last() override;
  void settle() noexcept override;

 private:
  Allocations allocations_;
};

}  // namespace ebbtide
