#include "store/copy_engine.h"

#include "driver/context.h"

namespace ebbtide {
namespace {

// As many pieces as the ring holds when each has one part, which is the case for scattered memory. A piece keeps its
// event until its last part is in place.
constexpr size_t kPiecesUnderWay = 32;

// Makes the device's context current for the length of the expression.
Stream create_stream(int device) {
  const ContextScope scope(device);
  return Stream::create();
}

Stream create_side_stream(int device) {
  const ContextScope scope(device);
  return Stream::create_first();
}

std::vector<Event> create_events(int device, size_t count) {
  const ContextScope scope(device);
  std::vector<Event> events;
  events.reserve(count);
  while (events.size() < count) events.push_back(Event::create());
  return events;
}

}  // namespace

CopyEngine::CopyEngine(int device, std::unique_ptr<Staging> staging)
    : device_(device),
      staging_(std::move(staging)),
      stream_(create_stream(device)),
      side_stream_(create_side_stream(device)),
      landings_(create_events(device, kPiecesUnderWay)) {}

}  // namespace ebbtide
