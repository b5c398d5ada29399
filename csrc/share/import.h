#pragma once

#include <deque>
#include <vector>

#include "core/state/core.h"
#include "vmm/reservation.h"

namespace ebbtide {

// A piece of another process's memory. The caller closes the file.
struct ImportedPiece {
  int file;
  uint64_t size_bytes;
};

// Memory of another process at addresses of this one, which stay while it is mapped or not. No operation moves it, and
// no budget counts it: it is the other's.
class Import {
 public:
  static constexpr const char* kName = "imported memory";

  // In order, side by side. Throws InvalidArgument, DriverError.
  Import(Core& core, int device, const std::vector<ImportedPiece>& pieces);

  CUdeviceptr address() const { return reservation_.address(); }
  bool is_mapped() const { return !pieces_.empty(); }
  // Waits for the work that is queued on the device. Throws CaptureError, DriverError.
  void wait();
  // The same, then gives the memory up. Called again after an error, it goes on.
  void unmap();
  // The sizes are those of the first time. Throws InvalidArgument, StateError (it is mapped), DriverError.
  void map(const std::vector<ImportedPiece>& pieces);

 private:
  struct Piece {
    PhysicalMemory memory;
    Mapping mapping;
  };
  void map_all(const std::vector<ImportedPiece>& pieces);

  Core& core_;
  const int device_;
  std::vector<uint64_t> sizes_;
  Reservation reservation_;
  std::deque<Piece> pieces_;  // destroyed before the addresses
};

}  // namespace ebbtide
