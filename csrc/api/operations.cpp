#include <memory>
#include <string>

#include "api/ebbtide.h"
#include "api/guard.h"
#include "api/handles.h"
#include "api/pending.h"
#include "api/view.h"
#include "core/operation/operation.h"

// pause, resume and their like, and their reports.
using namespace ebbtide;
using api::guarded;
using api::require;

struct ebbtide_report {
  Report report;
};
struct ebbtide_operation {
  std::unique_ptr<Operation> operation;
};

namespace {

// Leaked on purpose: handles are given back after static destructors have run, too.
api::Handles<ebbtide_report>& reports() {
  static auto* const table = new api::Handles<ebbtide_report>("report");
  return *table;
}
api::Handles<ebbtide_operation>& operations() {
  static auto* const table = new api::Handles<ebbtide_operation>("operation");
  return *table;
}
void hand_out(Report report, ebbtide_report** out) {
  if (out != nullptr) *out = api::hand_out_report(std::move(report));
}

std::unique_ptr<Operation> claim(OperationKind kind, OperationRequest request) {
  return Operation::claim(Core::instance(), kind, std::move(request));
}

ebbtide_status run(OperationKind kind, const ebbtide_request* request, ebbtide_report** report, ebbtide_error* error) {
  return guarded(error,
                 [&] { hand_out(std::move(claim(kind, api::read_request(request))->commit().front()), report); });
}

}  // namespace

namespace ebbtide::api {

ebbtide_report* hand_out_report(Report report) {
  return reports().add(std::make_unique<ebbtide_report>(ebbtide_report{std::move(report)}));
}

}  // namespace ebbtide::api

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
  return guarded(error, [&] {
    OperationRequest read = api::read_request(request);
    require(!read.tags.addresses.empty(), "a trim names the allocations that nobody uses, by address");
    hand_out(std::move(claim(OperationKind::kTrim, std::move(read))->commit().front()), report);
  });
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
    api::add_unused(request, other);
    std::vector<Report> reports = claim(OperationKind::kSwap, std::move(request))->commit();
    hand_out(std::move(reports.front()), pause_report);
    hand_out(std::move(reports.back()), resume_report);
  });
}

ebbtide_status ebbtide_resume_async(const ebbtide_request* request, ebbtide_pending** pending, ebbtide_error* error) {
  return guarded(error, [&] {
    require(pending != nullptr, "pending is null");
    *pending = api::hand_out_pending(PendingResume::start(claim(OperationKind::kResume, api::read_request(request))));
  });
}

ebbtide_status ebbtide_preview(ebbtide_operation_kind kind, const ebbtide_request* request, ebbtide_visit_name visit,
                               void* user, ebbtide_error* error) {
  return guarded(error, [&] {
    require(visit != nullptr, "visit is null");
    require(kind <= EBBTIDE_DEMOTE, "there is no operation of this kind");
    require_not_forked();
    const auto names =
        Operation::preview(Core::instance(), static_cast<OperationKind>(kind), api::read_request(request));
    for (const std::string& name : names) visit(user, name.c_str());
  });
}

ebbtide_status ebbtide_wait_for_tags(const ebbtide_request* request, ebbtide_error* error) {
  return guarded(error, [&] {
    require_not_forked();
    Core::instance().registry.wait_for(api::read_request(request).tags);
  });
}

ebbtide_status ebbtide_claim(ebbtide_operation_kind kind, const ebbtide_request* request, ebbtide_operation** operation,
                             ebbtide_error* error) {
  return guarded(error, [&] {
    require(operation != nullptr, "operation is null");
    require(kind == EBBTIDE_PAUSE || kind == EBBTIDE_RESUME, "a claim is for a pause or a resume");
    auto made = std::make_unique<ebbtide_operation>();
    made->operation = claim(static_cast<OperationKind>(kind), api::read_request(request));
    *operation = operations().add(std::move(made));
  });
}

// In a forked child an operation is left as it is: its locks and its device are the parent's.
ebbtide_status ebbtide_commit(ebbtide_operation* operation, ebbtide_report** report, ebbtide_error* error) {
  return guarded(error, [&] {
    require(operation != nullptr, "operation is null");
    const auto owned = operations().take(operation);
    hand_out(std::move(owned->operation->commit().front()), report);
  });
}

ebbtide_status ebbtide_abandon(ebbtide_operation* operation, ebbtide_error* error) {
  return guarded(error, [&] {
    require(operation != nullptr, "operation is null");
    operations().take(operation);
  });
}

ebbtide_status ebbtide_read_report(const ebbtide_report* report, ebbtide_report_totals* totals, ebbtide_error* error) {
  return guarded(error, [&] {
    require(report != nullptr, "report is null");
    require(totals != nullptr, "totals is null");
    const Report& found = reports().at(report).report;
    const ReportRow sum = found.totals();
    const ebbtide_report_totals filled = {sizeof filled, static_cast<int32_t>(found.kind),
                                          sum.bytes,     sum.copied,
                                          sum.skipped(), found.seconds,
                                          sum.clean,     sum.unused,
                                          sum.constant,  found.note.c_str()};
    api::write_struct(totals, filled, api::kLeastReportTotals, "ebbtide_report_totals");
  });
}

ebbtide_status ebbtide_visit_report(const ebbtide_report* report, ebbtide_visit_row visit, void* user,
                                    ebbtide_error* error) {
  return guarded(error, [&] {
    require(report != nullptr, "report is null");
    require(visit != nullptr, "visit is null");
    for (const auto& [key, row] : reports().at(report).report.rows) {
      const ebbtide_report_row shown = api::show_row(key.first, key.second, row);
      visit(user, &shown);
    }
  });
}

ebbtide_status ebbtide_visit_left(const ebbtide_report* report, ebbtide_visit_row visit, void* user,
                                  ebbtide_error* error) {
  return guarded(error, [&] {
    require(report != nullptr, "report is null");
    require(visit != nullptr, "visit is null");
    const auto held = reports().at(report).report.held;
    for (const HeldBytes& each : *held) {
      if (each.bytes == 0) continue;
      const ebbtide_report_row shown = api::show_row(each.tag->name, each.device, {.bytes = each.bytes});
      visit(user, &shown);
    }
  });
}

void ebbtide_free_report(ebbtide_report* report) { reports().drop(report); }

}  // extern "C"
