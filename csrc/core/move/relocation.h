#pragma once

#include <map>
#include <memory>
#include <vector>

#include "core/move/move.h"
#include "core/transfer/block_scan.h"
#include "driver/stream.h"

namespace ebbtide {

// Moves chunks to other memory at the same addresses, each to a handle of its own. The new memory first lies behind the
// addresses of a spare allocation, until all bytes are in it. Then each old handle is unmapped, with all its chunks,
// and the new memory mapped. If that fails, the old memory is mapped again; if that fails too, the chunks are detached.
// The rest of the spare allocation is freed like any other memory.
class Relocation : public Move {
 public:
  void run_device(int device) final;
  void settle() noexcept override;

 protected:
  struct Source {
    std::shared_ptr<Allocation> allocation;
    Chunk* chunk;
    Chunk* spare = nullptr;  // the chunk of the spare allocation that it moves to
    HostTwin twin = {};
    size_t first_scanned = 0;  // the number of its first block in the scan, where it has a twin
    uint64_t clean_bytes = 0;  // that the new memory held already
    CUdeviceptr address() const { return allocation->address() + chunk->offset; }
  };
  using Sources = std::vector<Source>;  // behind one handle
  // Handles that are copied at the same time.
  struct Batch {
    std::vector<Sources> handles;
    std::shared_ptr<Allocation> spare;
    std::unique_ptr<EnginePool::Loan> engine;
    std::unique_ptr<BlockScan> scan;  // null: nothing is known of the content
  };
  // The place is the one that the chunks move to.
  Relocation(Core& core, const OperationRequest& request, OperationKind kind, Place place)
      : Move(core, request, kind), place_(place) {}

  // Takes the memory of one batch, in run_device(). False: there is no room for this one and for all later ones.
  virtual bool begin(int /*device*/, Batch& /*batch*/) { return true; }
  virtual void copy(const Batch& batch, Source& source, const Stream& stream);
  virtual void note_copied(Batch& /*batch*/) {}
  // The chunks of a handle are in their place. The old memory goes after this, unless the spare allocation gets it.
  virtual void note_moved(int /*device*/, Batch& /*batch*/, const Sources& /*sources*/,
                          const std::shared_ptr<Backing>& /*old*/) {}

  static void copy_range(CUdeviceptr to, CUdeviceptr from, size_t size_bytes, const Stream& stream);
  // The resident chunks on devices, by handle, in the order of addresses.
  std::vector<Sources> by_handle(const Allocations& allocations);
  void add_spare(Batch& batch, Source& source) const;
  // With device memory.
  void add_device_spare(Batch& batch, Source& source);
  // After the last spare chunk.
  void reserve_addresses(Batch& batch);
  // Does nothing where it is mapped already.
  static void map_spare(int device, const Batch& batch, const Source& source);
  // Where there is no room for its tables, there is no scan.
  void make_scan(int device, Batch& batch, size_t block_count);

  std::map<int, std::vector<Batch>> batches_;  // by device

 private:
  void copy_all(int device, Batch& batch);
  void remap(int device, Batch& batch, const Sources& sources);

  const Place place_;
};

}  // namespace ebbtide
