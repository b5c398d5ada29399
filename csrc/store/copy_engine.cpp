#include "store/copy_engine.h"

#include "driver/context.h"

namespace ebbtide {
namespace {

// As many pieces as the ring holds when each has one part, which is the case for scattered memory. A piece keeps its
// event until its last part is in place.
constexpr size_t kPiecesUnderWay = 32;

template <typename Made>
Made create(int device, Made (*make)()) {
  const ContextScope scope(device);
  return make();
}

std::vector<Event> create_events() {
  std::vector<Event> events;
  events.reserve(kPiecesUnderWay);
  while (events.size() < kPiecesUnderWay) events.push_back(Event::create());
  return events;
}

}  // namespace

CopyEngine::CopyEngine(int device, std::unique_ptr<HostMemory> staging)
    : device_(device),
      staging_(std::move(staging)),
      stream_(create(device, Stream::create)),
      side_stream_(create(device, Stream::create_first)),
      landings_(create(device, create_events)) {}

bool CopyEngine::settle(const Stream& stream) noexcept {
  for (int tries = 0; tries < 2; ++tries)
    if (driver().cuStreamSynchronize(stream.get()) == CUDA_SUCCESS) return true;
  poison();
  return false;
}

}  // namespace ebbtide
