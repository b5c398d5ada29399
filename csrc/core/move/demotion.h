#pragma once

#include <map>
#include <vector>

#include "core/move/relocation.h"

namespace ebbtide {

// Moves chunks from the device to the host, where the device still reaches them: whole handles, in the order of
// addresses, as far as they fit into the bytes of the request. Each handle of device memory is given back as soon as
// its chunks have moved.
//
// A chunk that has a twin moves there, and only its blocks that have changed are copied.
class Demotion final : public Relocation {
 public:
  Demotion(Core& core, const OperationRequest& request) : Relocation(core, request, Place::kHost) {}
  OperationKind kind() const override { return OperationKind::kDemote; }
  TagClaim claim() const override;
  void prepare(const Allocations& allocations) override;
  void settle() noexcept override;
  void count(Counters& counters, const ReportRow& total) const override {
    counters.bytes_demoted += total.copied + total.clean;
  }

 private:
  void take_host_memory(int device, Batch& batch);
  bool begin(int device, Batch& batch) override;
  void copy(const Batch& batch, Source& source, const Stream& stream) override;
  void note_moved(int device, Batch& batch, const Sources& sources, const std::shared_ptr<Backing>& old) override;

  std::map<int, std::vector<HostPool::Handle>> fresh_;  // by device: for the chunks without a twin, in order
};

}  // namespace ebbtide
