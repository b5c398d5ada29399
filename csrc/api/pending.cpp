#include "api/pending.h"

#include <vector>

#include "api/guard.h"
#include "api/handles.h"
#include "api/view.h"

// Asynchronous resumes.
using namespace ebbtide;
using api::guarded;
using api::require;

struct ebbtide_pending {
  std::shared_ptr<PendingResume> resume;
};

namespace {

// Leaked on purpose: handles are given back after static destructors have run, too.
api::Handles<ebbtide_pending>& pendings() {
  static auto* const table = new api::Handles<ebbtide_pending>("pending resume");
  return *table;
}

std::shared_ptr<PendingResume> find(const ebbtide_pending* pending) {
  require(pending != nullptr, "pending is null");
  return pendings().at(pending).resume;
}

}  // namespace

namespace ebbtide::api {

ebbtide_pending* hand_out_pending(std::shared_ptr<PendingResume> pending) {
  return pendings().add(std::make_unique<ebbtide_pending>(ebbtide_pending{std::move(pending)}));
}

}  // namespace ebbtide::api

extern "C" {

ebbtide_status ebbtide_pending_stream_wait(ebbtide_pending* pending, int32_t device, void* stream,
                                           const ebbtide_range* ranges, size_t range_count, ebbtide_error* error) {
  return guarded(error, [&] {
    require(range_count == 0 || ranges != nullptr, "ranges is null");
    std::vector<AddressRange> read;
    for (size_t index = 0; index < range_count; ++index) read.push_back(api::read_range(ranges[index]));
    find(pending)->stream_wait(device, static_cast<CUstream>(stream), read);
  });
}

ebbtide_status ebbtide_pending_ready(ebbtide_pending* pending, const ebbtide_range* range, int32_t* ready,
                                     ebbtide_error* error) {
  return guarded(error, [&] {
    require(ready != nullptr, "ready is null");
    const auto resume = find(pending);
    *ready = (range == nullptr ? resume->is_over() : resume->is_ready(api::read_range(*range))) ? 1 : 0;
  });
}

ebbtide_status ebbtide_pending_wait(ebbtide_pending* pending, ebbtide_report** report, ebbtide_error* error) {
  return guarded(error, [&] {
    Report done = find(pending)->wait();
    if (report != nullptr) *report = api::hand_out_report(std::move(done));
  });
}

void ebbtide_free_pending(ebbtide_pending* pending) { pendings().drop(pending); }

}  // extern "C"
