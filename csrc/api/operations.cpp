#include <memory>
#include <string>

#include "api/ebbtide.h"
#include "api/guard.h"
#include "api/handles.h"
#include "api/view.h"
#include "core/operation.h"

// pause and resume, their reports, and the stored bytes.
using namespace ebbtide;
using api::guarded;
using api::require;

struct ebbtide_report {
  Report report;
};
struct ebbtide_operation {
  std::unique_ptr<Operation> operation;
};
struct ebbtide_backup {
  std::shared_ptr<Stored> stored;
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
api::Handles<ebbtide_backup>& backups() {
  static auto* const table = new api::Handles<ebbtide_backup>("backup");
  return *table;
}

// For the functions that give back and report nothing: an unknown handle, or a forked child's, is left alone.
template <typename Object>
void drop(api::Handles<Object>& table, Object* handle) {
  if (handle == nullptr) return;
  guarded(nullptr, [&] { table.take(handle); });
}

void hand_out(Report report, ebbtide_report** out) {
  if (out != nullptr) *out = reports().add(std::make_unique<ebbtide_report>(ebbtide_report{std::move(report)}));
}

ebbtide_status run(OperationKind kind, const ebbtide_request* request, ebbtide_report** report, ebbtide_error* error) {
  return guarded(error, [&] {
    const OperationRequest read = api::read_request(request);
    hand_out(Saver::instance().claim(kind, read)->commit(), report);
  });
}

ebbtide_status visit_rows(const ebbtide_report* report, ReportRows Report::* rows, ebbtide_visit_row visit, void* user,
                          ebbtide_error* error) {
  return guarded(error, [&] {
    require(report != nullptr, "report is null");
    require(visit != nullptr, "visit is null");
    for (const auto& [key, row] : reports().at(report).report.*rows) {
      const ebbtide_report_row shown = {sizeof shown, key.first.c_str(), key.second,
                                        row.bytes,    row.copied,        row.skipped};
      visit(user, &shown);
    }
  });
}

}  // namespace

extern "C" {

ebbtide_status ebbtide_pause(const ebbtide_request* request, ebbtide_report** report, ebbtide_error* error) {
  return run(OperationKind::kPause, request, report, error);
}

ebbtide_status ebbtide_resume(const ebbtide_request* request, ebbtide_report** report, ebbtide_error* error) {
  return run(OperationKind::kResume, request, report, error);
}

ebbtide_status ebbtide_claim(ebbtide_operation_kind kind, const ebbtide_request* request, ebbtide_operation** operation,
                             ebbtide_error* error) {
  return guarded(error, [&] {
    require(operation != nullptr, "operation is null");
    require(kind == EBBTIDE_PAUSE || kind == EBBTIDE_RESUME, "unknown kind of operation");
    auto made = std::make_unique<ebbtide_operation>();
    made->operation = Saver::instance().claim(static_cast<OperationKind>(kind), api::read_request(request));
    *operation = operations().add(std::move(made));
  });
}

// In a forked child an operation is left as it is: its locks and its device are the parent's.
ebbtide_status ebbtide_commit(ebbtide_operation* operation, ebbtide_report** report, ebbtide_error* error) {
  return guarded(error, [&] {
    require(operation != nullptr, "operation is null");
    const auto owned = operations().take(operation);
    hand_out(owned->operation->commit(), report);
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
    const ebbtide_report_totals filled = {
        sizeof filled, static_cast<int32_t>(found.kind), sum.bytes, sum.copied, sum.skipped, found.seconds};
    api::write_struct(totals, filled, api::kLeastReportTotals, "ebbtide_report_totals");
  });
}

ebbtide_status ebbtide_visit_report(const ebbtide_report* report, ebbtide_visit_row visit, void* user,
                                    ebbtide_error* error) {
  return visit_rows(report, &Report::rows, visit, user, error);
}

ebbtide_status ebbtide_visit_left(const ebbtide_report* report, ebbtide_visit_row visit, void* user,
                                  ebbtide_error* error) {
  return visit_rows(report, &Report::left, visit, user, error);
}

void ebbtide_free_report(ebbtide_report* report) { drop(reports(), report); }

ebbtide_status ebbtide_backup_of(const void* address, uint64_t size_bytes, const void** bytes, ebbtide_backup** backup,
                                 ebbtide_error* error) {
  return guarded(error, [&] {
    require(bytes != nullptr && backup != nullptr, "bytes or backup is null");
    require_not_forked();
    Registry& registry = Saver::instance().registry;
    const auto allocation = registry.find(reinterpret_cast<CUdeviceptr>(address));
    require(allocation != nullptr, "this address is in no allocation of ebbtide");
    const size_t begin = reinterpret_cast<CUdeviceptr>(address) - allocation->address();
    require(size_bytes <= allocation->size_bytes() - begin, "the range reaches beyond its allocation");
    *bytes = nullptr;
    *backup = nullptr;
    for (const Chunk& chunk : allocation->chunks) {
      const bool is_inside = chunk.offset < begin + size_bytes && begin < chunk.offset + chunk.size_bytes;
      if (is_inside && chunk.place.load() != Place::kStored) return;
    }
    auto stored = registry.stored_of(*allocation);
    if (stored == nullptr || stored->backup->view() == nullptr) return;
    *bytes = stored->backup->view() + begin;
    *backup = backups().add(std::make_unique<ebbtide_backup>(ebbtide_backup{std::move(stored)}));
  });
}

void ebbtide_release_backup(ebbtide_backup* backup) { drop(backups(), backup); }

}  // extern "C"
