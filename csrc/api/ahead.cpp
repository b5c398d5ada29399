#include "core/operation/ahead.h"

#include <utility>
#include <vector>

#include "api/ebbtide.h"
#include "api/guard.h"
#include "api/pending.h"
#include "api/view.h"

// Copies ahead of a pause.
using namespace ebbtide;
using api::guarded;
using api::require;

namespace {

constexpr const char* kName = "ebbtide_ahead";

}  // namespace

extern "C" {

ebbtide_status ebbtide_copy_ahead(const char* tag, ebbtide_ahead* progress, ebbtide_report** report,
                                  ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    require(tag != nullptr, "tag is null");
    require(progress != nullptr, "progress is null");
    const ebbtide_ahead defaults = EBBTIDE_AHEAD_INIT;
    ebbtide_ahead given = api::read_struct(progress, defaults, api::kLeastAhead, kName);
    require(given.step_bytes >= AheadProgress::kLeastStepBytes, "step_bytes is less than 2 MiB");
    require(given.threads >= 0, "threads is negative");
    AheadProgress reached{.step_bytes = given.step_bytes,
                          .threads = given.threads,
                          .next_sequence = given.next_allocation,
                          .next_offset = given.next_offset};
    require(given.unused_count == 0 || given.unused != nullptr, "unused is null");
    std::vector<AddressRange> unused;
    for (size_t index = 0; index < given.unused_count; ++index) unused.push_back(api::read_range(given.unused[index]));
    auto done = copy_ahead(Core::instance(), tag, reached, AddressRanges(std::move(unused)));
    given.is_held_up = done ? 0 : 1;
    given.is_over = reached.is_over ? 1 : 0;
    given.next_allocation = reached.next_sequence;
    given.next_offset = reached.next_offset;
    api::write_struct(progress, given, api::kLeastAhead, kName);
    if (report == nullptr) return;
    Report nothing;
    nothing.kind = OperationKind::kPrepare;
    *report = api::hand_out_report(done ? std::move(*done) : std::move(nothing));
  });
}

}  // extern "C"
