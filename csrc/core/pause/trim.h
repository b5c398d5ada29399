#pragma once

#include "core/pause/removal.h"

namespace ebbtide {

// Drops the content of allocations that are not in use, without a pause of their tag. They come back only where a
// resume names their address.
class Trim final : public Removal {
 public:
  // request outlives it.
  Trim(Core& core, const OperationRequest& request) : Removal(core, request) {}
  OperationKind kind() const override { return OperationKind::kTrim; }
  TagClaim claim() const override;
  void prepare(const Allocations& allocations) override;
  std::vector<int> devices() const override;
  void run_device(int /*device*/) override {}
  void run_last() override;
  void settle() noexcept override;

 private:
  Allocations allocations_;
};

}  // namespace ebbtide
