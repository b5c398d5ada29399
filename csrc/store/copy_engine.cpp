#include "store/copy_engine.h"

#include "driver/context.h"

namespace ebbtide {
namespace {

// Pieces that the copy engine takes from the store by itself need no slot: enough for the bus to stay busy while a thread maps or unmaps a chunk.
constexpr int kPiecesUnderWay = 4;

// In the device's context, which is current for the length of the expression.
Stream create_stream(int device) {
  const ContextScope scope(device);
  return Stream::create_first();
}

}  // namespace

CopyEngine::CopyEngine(int device, std::unique_ptr<Staging> staging)
    : device_(device), staging_(std::move(staging)), side_stream_(create_stream(device)) {}

void CopyEngine::make_lanes(int lane_count) {
  const ContextScope scope(device_);
  while (this->lane_count() < lane_count) {
    CopyLane lane{Stream::create(), {}};
    for (int event = 0; event < kPiecesUnderWay; ++event) lane.events.push_back(Event::create());
    lanes_.push_back(std::move(lane));
  }
}

}  // namespace ebbtide
