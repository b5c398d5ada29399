#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/operation.h"

namespace ebbtide {

// create all physical memory (so that out-of-memory is known before a byte moves) -> map everything -> copy back. Memory of what had no backup reads as zeros.
class ResumePart final : public OperationPart {
 public:
  using OperationPart::OperationPart;
  void prepare(const Allocations& allocations) override;
  bool takes_memory_away() const override { return false; }
  void run() override;
  void settle() noexcept override;

 private:
  struct Returning {
    std::shared_ptr<Allocation> allocation;
    Chunk* chunk;
  };
  struct DevicePart {
    uint64_t bytes = 0;
    uint64_t stored_bytes = 0;
    std::vector<Returning> returning;
    std::vector<size_t> stored;  // indices in returning, parallel to jobs
    std::vector<CopyJob> jobs;
    std::optional<StagingPool::Loan> ring;
    std::unique_ptr<Copier> copier;
  };

  void select(const std::shared_ptr<Allocation>& allocation);
  void create_memory(int device, DevicePart& part);
  void try_create_memory(int device, DevicePart& part);
  void arrive(const Returning& returning, uint64_t copied_bytes);
  void give_back_unused(DevicePart& part) noexcept;

  std::map<int, DevicePart> parts_;  // by device
};

}  // namespace ebbtide
