#pragma once

#include <map>
#include <vector>

#include "core/move/relocation.h"

// The kinds of relocation.
namespace ebbtide {

// Moves chunks from the host to the device: as many as there is room for, the oldest first.
class Promotion final : public Relocation {
 public:
  Promotion(Core& core, const OperationRequest& request)
      : Relocation(core, request, OperationKind::kPromote, Place::kDevice) {}
  TagClaim claim() const override;
  void prepare(const Allocations& allocations) override;
  void count(Counters& counters, const ReportRow& total) const override { counters.bytes_promoted += total.bytes; }

 private:
  void note_stop(int device, uint64_t chunk_bytes, uint64_t usable_bytes);
  Batch create_memory(int device, Sources sources);
  void note_copied(Batch& batch) override;
  void note_moved(int device, Batch& batch, const Sources& sources, const std::shared_ptr<Backing>& old) override;
  bool keep_host_memory(const Batch& batch, const Source& source, Backing& old) noexcept;
};

// Moves chunks from the device to the host, where the device still reaches them: whole handles, in the order of
// addresses, as far as they fit into the bytes of the request. Each handle of device memory is given back as soon as
// its chunks have moved. A chunk that has a twin moves there, and only its changed blocks are copied.
class Demotion final : public Relocation {
 public:
  Demotion(Core& core, const OperationRequest& request)
      : Relocation(core, request, OperationKind::kDemote, Place::kHost) {}
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

// Whether one of these shares a handle with an allocation that is not among them.
bool is_any_shared(const Allocations& allocations);

// Where a named allocation shares a handle with one that is not named, each chunk of the handle gets a handle of its
// own, so that one can leave without the others. Handles are separated one after the other, the smallest first. Where
// the device has too little memory for one, it and the larger ones stay shared.
class Separation final : public Relocation {
 public:
  Separation(Core& core, const OperationRequest& request)
      : Relocation(core, request, OperationKind::kSeparate, Place::kDevice) {}
  // Any allocation of the tags may share memory with the named ones.
  TagClaim claim() const override;
  void prepare(const Allocations& allocations) override;

 private:
  bool begin(int device, Batch& batch) override;
};

}  // namespace ebbtide
