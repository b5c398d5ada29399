#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core_fixture.h"

// The fixture of fault injection: allocations with known bytes, and the checks that must hold at every moment, whatever
// failed.
namespace ebbtide::testing {

struct BlockSpec {
  std::string tag;
  BackupKind backup = BackupKind::kRam;
  int device = 0;
  std::vector<uint64_t> chunk_bytes;
};

class FaultTest : public CoreTest {
 protected:
  // Starts anew with these allocations, filled.
  void build(const std::vector<BlockSpec>& specs);

  // Checks invariants 1 to 3 for the present state: addresses, bytes, owners, budgets, the state of each tag.
  void expect_sound(const std::string& when);
  // The place of every chunk.
  std::vector<Place> places();
  // Records which chunks were dropped until now. expect_sound does it first.
  void note_dropped();
  // Writes the dropped chunks anew.
  void refill_blank();

  // The names of the driver calls that act makes, in order.
  std::vector<std::string> calls_of(const std::function<void()>& act);
  // Leaves out the objects that may be lost if the driver refuses all calls: streams, events, queued copies, and the
  // ring that they may still use.
  static Live without_lost(Live live);

  struct Block {
    BlockSpec spec;
    CUdeviceptr address = 0;
    std::vector<bool> is_blank;  // by chunk: was dropped, so reads as zeros from then on
  };
  std::vector<Block> blocks_;
};

}  // namespace ebbtide::testing
