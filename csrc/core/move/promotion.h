#pragma once

#include <string>

#include "core/move/relocation.h"

namespace ebbtide {

// Moves chunks from the host to the device: as many as there is room for, the oldest first.
class Promotion final : public Relocation {
 public:
  Promotion(Core& core, const OperationRequest& request) : Relocation(core, request, Place::kDevice) {}
  OperationKind kind() const override { return OperationKind::kPromote; }
  TagClaim claim() const override;
  void prepare(const Allocations& allocations) override;
  std::string note() const override { return note_; }
  void count(Counters& counters, const ReportRow& total) const override { counters.bytes_promoted += total.bytes; }

 private:
  void note_stop(int device, uint64_t chunk_bytes, uint64_t usable_bytes);
  Batch create_memory(int device, Sources sources);
  void note_copied(Batch& batch) override;
  void note_moved(int device, Batch& batch, const Sources& sources, const std::shared_ptr<Backing>& old) override;
  bool keep_host_memory(const Batch& batch, const Source& source, Backing& old) noexcept;

  std::string note_;  // where it stopped for lack of room
};

}  // namespace ebbtide
