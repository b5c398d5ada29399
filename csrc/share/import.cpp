#include "share/import.h"

#include <string>

#include "base/error.h"
#include "driver/context.h"
#include "vmm/deferred_undos.h"

namespace ebbtide {
namespace {

constexpr uint64_t kLargest = 1ULL << 46;  // no device has so much

uint64_t sum_of(const std::vector<ImportedPiece>& pieces) {
  uint64_t sum = 0;
  for (const ImportedPiece& piece : pieces) {
    if (piece.size_bytes == 0 || piece.size_bytes > kLargest - sum)
      throw InvalidArgument("imported memory has pieces of 1 byte or more, and at most 64 TiB");
    sum += piece.size_bytes;
  }
  if (sum == 0) throw InvalidArgument("imported memory has at least one piece");
  return sum;
}

}  // namespace

Import::Import(Core& core, int device, const std::vector<ImportedPiece>& pieces) : core_(core), device_(device) {
  const uint64_t size_bytes = sum_of(pieces);
  for (const ImportedPiece& piece : pieces) sizes_.push_back(piece.size_bytes);
  const ContextScope scope(device);
  reservation_ = Reservation::reserve(size_bytes);
  map_all(pieces);
}

void Import::map_all(const std::vector<ImportedPiece>& pieces) {
  core_.peers.refresh(false);
  const DeviceSet peers = core_.peers.of(device_);
  std::deque<Piece> mapped;
  uint64_t offset = 0;
  for (const ImportedPiece& each : pieces) {
    Piece& piece = mapped.emplace_back();
    piece.memory = PhysicalMemory::import_file(each.file, each.size_bytes, device_);
    piece.mapping = core_.peers.map(address() + offset, piece.memory, device_, peers);
    offset += each.size_bytes;
  }
  pieces_ = std::move(mapped);
}

void Import::wait() {
  const auto permit = core_.capture_gate.try_enter();
  if (!permit || is_capture_visible(device_, nullptr)) {
    throw CaptureError("a stream capture is under way, and to give up another process's memory would break it");
  }
  const ContextScope scope(device_);
  synchronize_device(device_);
}

void Import::unmap() {
  if (!is_mapped()) return;
  wait();
  while (is_mapped()) {
    pieces_.back().mapping.unmap();
    pieces_.back().memory.release();
    pieces_.pop_back();
  }
}

void Import::map(const std::vector<ImportedPiece>& pieces) {
  if (is_mapped()) throw StateError("this imported memory is mapped");
  sum_of(pieces);
  bool is_alike = pieces.size() == sizes_.size();
  for (size_t index = 0; is_alike && index < sizes_.size(); ++index)
    is_alike = pieces[index].size_bytes == sizes_[index];
  if (!is_alike) throw InvalidArgument("imported memory comes back in the pieces that it had");
  const ContextScope scope(device_);
  deferred_undos::retry(false);  // mappings that were to go before may be in the way
  map_all(pieces);
}

}  // namespace ebbtide
