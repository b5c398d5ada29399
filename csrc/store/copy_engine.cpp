#include "store/copy_engine.h"

#include <algorithm>

#include "driver/context.h"

namespace ebbtide {
namespace {

// Enough for the bus to stay busy while a thread maps or unmaps a chunk.
constexpr int kDirectPiecesUnderWay = 4;

// In the device's context, which is current for the length of the expression.
Stream create_stream(int device) {
  const ContextScope scope(device);
  return Stream::create();
}

}  // namespace

CopyEngine::CopyEngine(int device, std::unique_ptr<Staging> staging, int lane_count)
    : device_(device), staging_(std::move(staging)), side_stream_(create_stream(device)) {
  const ContextScope scope(device);
  const int lanes = std::clamp(lane_count, 1, staging_->slot_count());
  const int slots_each = staging_->slot_count() / lanes;
  lanes_.reserve(static_cast<size_t>(lanes));
  for (int index = 0; index < lanes; ++index) {
    CopyLane& lane = lanes_.emplace_back(CopyLane{Stream::create(), {}, {}});
    for (int slot = 0; slot < slots_each; ++slot) lane.slots.push_back(staging_->slot(index * slots_each + slot));
    const int events = std::max(slots_each, kDirectPiecesUnderWay);
    for (int event = 0; event < events; ++event) lane.events.push_back(Event::create());
  }
}

}  // namespace ebbtide
