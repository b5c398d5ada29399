#pragma once

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "core/move/backups.h"
#include "core/move/move.h"

namespace ebbtide {

struct PausedAllocation;

// A chunk whose memory goes.
struct LeavingChunk {
  Allocation* allocation;
  Chunk* chunk;
  PausedAllocation* paused = nullptr;  // null: its content is dropped
  size_t first_scanned = 0;            // the number of its first block in the scan
  std::vector<CopyRange> ranges = {};  // to be copied
  bool is_followed = false;            // by its second look, behind its copy
  CUdeviceptr address() const { return allocation->address() + chunk->offset; }
};

// The chunks behind one handle, which leave together.
struct LeavingHandle {
  std::vector<LeavingChunk> chunks;
  size_t missing = 0;  // chunks whose bytes have not landed
};

// A move that takes memory away from allocations: a pause, or a trim.
class Removal : public Move {
 protected:
  using Handles = std::deque<LeavingHandle>;
  using Move::Move;

  // Adds the chunk to the one of these handles that is behind it.
  LeavingHandle& add_to_handle(Handles& handles, LeavingChunk leaving);
  LeavingHandle& handle_of(const LeavingChunk& leaving) { return *handle_of_.at(leaving.chunk->backing.get()); }
  static bool has_others(const LeavingHandle& handle);
  // Drops the content of dropped_, on one device, whose context is current, or on all.
  void drop(int device);
  void drop_all();
  // Releases the memory behind chunks that can no longer be reached.
  void release_memory(const LeavingHandle& handle);
  // A backup that was retained is of no use once the content was dropped.
  void forget_backup_if_dropped(Allocation& allocation) noexcept;

  virtual void release(int /*device*/, Backing& backing) { backing.release(); }

  std::map<int, Handles> dropped_;  // by device

 private:
  std::map<const Backing*, LeavingHandle*> handle_of_;
};

}  // namespace ebbtide
