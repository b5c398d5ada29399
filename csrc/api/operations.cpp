#include <memory>
#include <string>
#include <vector>

#include "api/ebbtide.h"
#include "api/guard.h"
#include "api/view.h"
#include "core/operation/ahead.h"
#include "core/operation/backup_view.h"
#include "core/operation/operation.h"
#include "core/operation/pending.h"

// pause, resume and the other operations, their results, and the stored bytes.
using namespace ebbtide;
using api::guarded;
using api::hand_out_report;
using api::handles;
using api::require;
using api::require_given;
using api::with_core;

struct ebbtide_operation {
  static constexpr const char* kName = "operation";
  std::unique_ptr<Operation> operation;
};
struct ebbtide_pending {
  static constexpr const char* kName = "pending resume";
  std::shared_ptr<PendingResume> resume;
};
struct ebbtide_paused_set {
  static constexpr const char* kName = "paused set";
  std::shared_ptr<PausedSet> set = std::make_shared<PausedSet>();
};
struct ebbtide_backup {
  static constexpr const char* kName = "backup";
  BackupView view;
};

namespace {

template <typename Handle, typename Content>
Handle* hand_out(Content content) {
  return handles<Handle>().add(std::make_unique<Handle>(Handle{std::move(content)}));
}

std::unique_ptr<Operation> claim(OperationKind kind, OperationRequest request) {
  if (kind == OperationKind::kDemote) api::require_overflow();
  return Operation::claim(Core::instance(), kind, std::move(request));
}

ebbtide_status run(OperationKind kind, const ebbtide_request* request, ebbtide_report** report, ebbtide_error* error) {
  return guarded(error, [&] {
    OperationRequest read = api::read_request(request);
    require(kind != OperationKind::kTrim || !read.tags.addresses.empty(),
            "a trim names unused allocations, by address");
    hand_out_report(std::move(claim(kind, std::move(read))->commit().front()), report);
  });
}

void add_unused(OperationRequest& request, const OperationRequest& other) {
  if (other.unused.empty()) return;
  request.unused_as_of =
      request.unused.empty() ? other.unused_as_of : std::min(request.unused_as_of, other.unused_as_of);
  request.unused = AddressRanges(request.unused, other.unused);
}

ebbtide_report_row show_row(const char* tag, int device, const ReportRow& row) {
  return {tag, device, row.bytes, row.copied, row.skipped(), row.clean, row.unused, row.constant};
}

ebbtide_status view(ViewKind kind, const void* address, uint64_t size_bytes, void** bytes, ebbtide_backup** backup,
                    ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require(bytes != nullptr && backup != nullptr, "bytes or backup is null");
    auto found = view_backup(core, {reinterpret_cast<CUdeviceptr>(address), size_bytes}, kind);
    std::byte* const shown = found ? found->bytes() : nullptr;
    *backup = found ? hand_out<ebbtide_backup>(std::move(*found)) : nullptr;
    *bytes = shown;
  });
}

}  // namespace

std::shared_ptr<PausedSet> ebbtide::api::find_paused_set(const ebbtide_paused_set* set) {
  return handles<ebbtide_paused_set>().at(set).set;
}

extern "C" {

ebbtide_status ebbtide_pause(const ebbtide_request* request, ebbtide_report** report, ebbtide_error* error) {
  return run(OperationKind::kPause, request, report, error);
}

ebbtide_status ebbtide_resume(const ebbtide_request* request, ebbtide_report** report, ebbtide_error* error) {
  return run(OperationKind::kResume, request, report, error);
}

ebbtide_status ebbtide_prepare(const ebbtide_request* request, ebbtide_report** report, ebbtide_error* error) {
  return run(OperationKind::kPrepare, request, report, error);
}

ebbtide_status ebbtide_trim(const ebbtide_request* request, ebbtide_report** report, ebbtide_error* error) {
  return run(OperationKind::kTrim, request, report, error);
}

ebbtide_status ebbtide_promote(const ebbtide_request* request, ebbtide_report** report, ebbtide_error* error) {
  return run(OperationKind::kPromote, request, report, error);
}

ebbtide_status ebbtide_demote(const ebbtide_request* request, ebbtide_report** report, ebbtide_error* error) {
  return run(OperationKind::kDemote, request, report, error);
}

ebbtide_status ebbtide_swap(const ebbtide_request* leaving, const ebbtide_request* returning,
                            ebbtide_report** pause_report, ebbtide_report** resume_report, ebbtide_error* error) {
  return guarded(error, [&] {
    OperationRequest request = api::read_request(leaving);
    OperationRequest other = api::read_request(returning);
    request.resume_tags = std::move(other.tags);
    request.retain = other.retain;
    request.order = std::move(other.order);
    add_unused(request, other);
    std::vector<Report> reports = claim(OperationKind::kSwap, std::move(request))->commit();
    hand_out_report(std::move(reports.front()), pause_report);
    hand_out_report(std::move(reports.back()), resume_report);
  });
}

ebbtide_status ebbtide_preview(ebbtide_operation_kind kind, const ebbtide_request* request, ebbtide_visit_name visit,
                               void* user, ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(visit, "visit");
    require(kind <= EBBTIDE_DEMOTE, "there is no operation of this kind");
    for (const std::string& name :
         Operation::preview(core, static_cast<OperationKind>(kind), api::read_request(request)))
      visit(user, name.c_str());
  });
}

ebbtide_status ebbtide_wait_for_tags(const ebbtide_request* request, ebbtide_error* error) {
  return with_core(error, [&](Core& core) { core.registry.wait_for(api::read_request(request).tags); });
}

ebbtide_status ebbtide_claim(ebbtide_operation_kind kind, const ebbtide_request* request, ebbtide_operation** operation,
                             ebbtide_error* error) {
  return guarded(error, [&] {
    require_given(operation, "operation");
    require(kind == EBBTIDE_PAUSE || kind == EBBTIDE_RESUME, "a claim is for a pause or a resume");
    *operation = hand_out<ebbtide_operation>(claim(static_cast<OperationKind>(kind), api::read_request(request)));
  });
}

// In a forked child an operation is left as it is: its locks and its device are the parent's.
ebbtide_status ebbtide_commit(ebbtide_operation* operation, ebbtide_report** report, ebbtide_error* error) {
  return guarded(error, [&] {
    const auto owned = handles<ebbtide_operation>().take(operation);
    hand_out_report(std::move(owned->operation->commit().front()), report);
  });
}

ebbtide_status ebbtide_abandon(ebbtide_operation* operation, ebbtide_error* error) {
  return guarded(error, [&] { handles<ebbtide_operation>().take(operation); });
}

// --- reports ---

ebbtide_status ebbtide_read_report(const ebbtide_report* report, ebbtide_report_totals* totals, ebbtide_error* error) {
  return guarded(error, [&] {
    require_given(totals, "totals");
    const Report& found = handles<ebbtide_report>().at(report).report;
    *totals = {static_cast<int32_t>(found.kind), found.seconds, found.note.c_str(), show_row("", -1, found.totals())};
  });
}

ebbtide_status ebbtide_visit_report(const ebbtide_report* report, ebbtide_visit_row visit, void* user,
                                    ebbtide_error* error) {
  return guarded(error, [&] {
    require_given(visit, "visit");
    for (const auto& [key, row] : handles<ebbtide_report>().at(report).report.rows) {
      const ebbtide_report_row shown = show_row(key.first.c_str(), key.second, row);
      visit(user, &shown);
    }
  });
}

ebbtide_status ebbtide_visit_remaining(const ebbtide_report* report, ebbtide_visit_row visit, void* user,
                                       ebbtide_error* error) {
  return guarded(error, [&] {
    require_given(visit, "visit");
    const auto held = handles<ebbtide_report>().at(report).report.held;
    for (const HeldBytes& each : *held) {
      if (each.bytes == 0) continue;
      const ebbtide_report_row shown = show_row(each.tag->name.c_str(), each.device, {.bytes = each.bytes});
      visit(user, &shown);
    }
  });
}

void ebbtide_free_report(ebbtide_report* report) { handles<ebbtide_report>().drop(report); }

ebbtide_status ebbtide_make_paused_set(ebbtide_paused_set** set, ebbtide_error* error) {
  return with_core(error, [&](Core&) {
    require_given(set, "set");
    *set = hand_out<ebbtide_paused_set>(std::make_shared<PausedSet>());
  });
}

ebbtide_status ebbtide_visit_paused_set(const ebbtide_paused_set* set, ebbtide_visit_name visit, void* user,
                                        ebbtide_error* error) {
  return guarded(error, [&] {
    require_given(visit, "visit");
    for (const std::string& tag : api::find_paused_set(set)->tags()) visit(user, tag.c_str());
  });
}

void ebbtide_free_paused_set(ebbtide_paused_set* set) { handles<ebbtide_paused_set>().drop(set); }

ebbtide_status ebbtide_pause_count(const char* tag, uint64_t* count, ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(tag, "tag");
    require_given(count, "count");
    *count = 0;
    core.registry.visit_tag(tag, [&](const Tag& found) { *count = found.pause_count; });
  });
}

// --- beside the program ---

ebbtide_status ebbtide_resume_async(const ebbtide_request* request, ebbtide_pending** pending, ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(pending, "pending");
    *pending = hand_out<ebbtide_pending>(
        PendingResume::start(Operation::claim(core, OperationKind::kResume, api::read_request(request))));
  });
}

ebbtide_status ebbtide_pending_stream_wait(ebbtide_pending* pending, int32_t device, void* stream,
                                           const ebbtide_range* ranges, size_t range_count, ebbtide_error* error) {
  return guarded(error, [&] {
    const auto read = api::read_ranges(ranges, range_count, "ranges");
    const auto resume = handles<ebbtide_pending>().at(pending).resume;
    resume->stream_wait(device, static_cast<CUstream>(stream), read);
  });
}

ebbtide_status ebbtide_pending_ready(ebbtide_pending* pending, const ebbtide_range* range, bool* ready,
                                     ebbtide_error* error) {
  return guarded(error, [&] {
    require_given(ready, "ready");
    const auto resume = handles<ebbtide_pending>().at(pending).resume;
    *ready = range == nullptr ? resume->is_over() : resume->is_ready(api::read_range(*range));
  });
}

ebbtide_status ebbtide_pending_wait(ebbtide_pending* pending, ebbtide_report** report, ebbtide_error* error) {
  return guarded(error, [&] {
    const auto resume = handles<ebbtide_pending>().at(pending).resume;
    hand_out_report(resume->wait(), report);
  });
}

void ebbtide_free_pending(ebbtide_pending* pending) { handles<ebbtide_pending>().drop(pending); }

ebbtide_status ebbtide_copy_ahead(const char* tag, ebbtide_ahead* progress, ebbtide_report** report,
                                  ebbtide_error* error) {
  return with_core(error, [&](Core& core) {
    require_given(tag, "tag");
    require_given(progress, "progress");
    require(progress->step_bytes >= AheadProgress::kLeastStepBytes, "step_bytes is less than 2 MiB");
    require(progress->threads >= 0, "threads is negative");
    AheadProgress reached{.step_bytes = progress->step_bytes,
                          .threads = progress->threads,
                          .next_sequence = progress->next_allocation,
                          .next_offset = progress->next_offset};
    auto done = copy_ahead(core, tag, reached,
                           AddressRanges(api::read_ranges(progress->unused, progress->unused_count, "unused")));
    progress->is_held_up = !done;
    progress->is_over = reached.is_over;
    progress->next_allocation = reached.next_sequence;
    progress->next_offset = reached.next_offset;
    Report nothing;
    nothing.kind = OperationKind::kPrepare;
    hand_out_report(std::move(done).value_or(std::move(nothing)), report);
  });
}

// --- the stored bytes ---

ebbtide_status ebbtide_backup_of(const void* address, uint64_t size_bytes, void** bytes, ebbtide_backup** backup,
                                 ebbtide_error* error) {
  return view(ViewKind::kSnapshot, address, size_bytes, bytes, backup, error);
}

ebbtide_status ebbtide_retained_backup_of(const void* address, uint64_t size_bytes, void** bytes,
                                          ebbtide_backup** backup, ebbtide_error* error) {
  return view(ViewKind::kWindow, address, size_bytes, bytes, backup, error);
}

void ebbtide_release_backup(ebbtide_backup* backup) { handles<ebbtide_backup>().drop(backup); }

}  // extern "C"
