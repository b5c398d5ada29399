#include "bindings/records.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <tuple>

#include "bindings/errors.h"

namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

void add_row(void* user, const ebbtide_report_row* row) {
  static_cast<std::vector<Row>*>(user)->push_back(
      {row->tag, row->device, row->bytes, row->copied, row->skipped, row->clean, row->unused, row->constant});
}

void add_left(void* user, const ebbtide_report_row* row) {
  static_cast<std::vector<LeftRow>*>(user)->push_back({row->tag, row->device, row->bytes});
}

constexpr std::array<const char*, 9> kVerdicts = {"none",     "copied",  "changed", "clean",     "unused",
                                                  "constant", "dropped", "left",    "uncompared"};
constexpr std::array<const char*, 5> kPlaces = {"device", "host", "stored", "dropped", "mixed"};
constexpr std::array<const char*, 8> kKinds = {"pause", "resume", "swap",    "prepare",
                                               "trim",  "show",   "promote", "demote"};
constexpr std::array<const char*, 4> kStates = {"resident", "paused", "partial", "empty"};

}  // namespace

std::vector<Row> ReportRecord::left() const {
  std::vector<Row> made;
  made.reserve(left_rows.size());
  for (const LeftRow& row : left_rows) made.push_back({row.tag, row.device, row.bytes, 0, 0, 0, 0, 0});
  std::sort(made.begin(), made.end(),
            [](const Row& a, const Row& b) { return std::tie(a.tag, a.device) < std::tie(b.tag, b.device); });
  return made;
}

ReportRecord::Plain ReportRecord::plain() const {
  return {kind, bytes, copied, skipped, clean, unused, constant, seconds, note};
}

ReportRecord read_report(ebbtide_report* report) {
  std::shared_ptr<ebbtide_report> owned(report, ebbtide_free_report);
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  ebbtide_report_totals totals = EBBTIDE_REPORT_TOTALS_INIT;
  ReportRecord record;
  raise_if_failed(ebbtide_read_report(report, &totals, &error), error);
  raise_if_failed(ebbtide_visit_report(report, add_row, &record.rows, &error), error);
  raise_if_failed(ebbtide_visit_left(report, add_left, &record.left_rows, &error), error);
  record.of = std::move(owned);
  record.kind = kKinds.at(static_cast<size_t>(totals.kind));
  record.bytes = totals.bytes;
  record.copied = totals.copied;
  record.skipped = totals.skipped;
  record.clean = totals.clean;
  record.unused = totals.unused;
  record.constant = totals.constant;
  record.seconds = totals.seconds;
  record.note = totals.note;
  return record;
}

AllocationRecord read_allocation(const ebbtide_allocation_info& info) {
  return {info.address,       info.size_bytes,  info.resident_bytes,
          info.stored_bytes,  info.device,      kPlaces.at(static_cast<size_t>(info.place)),
          info.backup,        info.chunk_count, info.is_trimmed != 0,
          info.sequence,      info.tag,         info.host_bytes,
          info.is_paused != 0};
}

TagRecord read_tag(const ebbtide_tag_info& info) {
  return {info.tag,
          kStates.at(static_cast<size_t>(info.state)),
          info.lease_count,
          info.allocation_count,
          info.size_bytes,
          info.resident_bytes,
          info.stored_bytes,
          info.dropped_bytes,
          info.trimmed_bytes,
          info.retained_bytes,
          info.host_bytes,
          info.left_bytes,
          info.detached_bytes,
          info.backups,
          info.is_hooked != 0,
          info.ahead_bytes};
}

StretchRow read_stretch(const ebbtide_stretch& stretch) {
  return {stretch.address, stretch.size_bytes, kPlaces.at(static_cast<size_t>(stretch.place)),
          kVerdicts.at(static_cast<size_t>(stretch.verdict))};
}

EventRow read_event(const ebbtide_event& event) {
  return {event.sequence, event.unix_seconds, event.seconds, event.kind,
          event.tags,     event.bytes,        event.copied,  event.detail};
}

void register_records(py::module_& module) {
#define EBBTIDE_READ(type, field) .def_readonly(#field, &type::field)
  py::class_<Row>(module, "Row") EBBTIDE_READ(Row, tag) EBBTIDE_READ(Row, device) EBBTIDE_READ(Row, bytes)
      EBBTIDE_READ(Row, copied) EBBTIDE_READ(Row, skipped) EBBTIDE_READ(Row, clean) EBBTIDE_READ(Row, unused)
          EBBTIDE_READ(Row, constant);
  py::class_<ReportRecord>(module, "Report") EBBTIDE_READ(ReportRecord, kind) EBBTIDE_READ(ReportRecord, bytes)
      EBBTIDE_READ(ReportRecord, copied) EBBTIDE_READ(ReportRecord, skipped) EBBTIDE_READ(ReportRecord, seconds)
          EBBTIDE_READ(ReportRecord, clean) EBBTIDE_READ(ReportRecord, unused) EBBTIDE_READ(ReportRecord, constant)
              EBBTIDE_READ(ReportRecord, rows) EBBTIDE_READ(ReportRecord, note)
                  .def_property_readonly("left", &ReportRecord::left)
                  .def_property_readonly("plain", &ReportRecord::plain);
  py::class_<DeviceRecord>(module, "DeviceInfo") EBBTIDE_READ(DeviceRecord, device) EBBTIDE_READ(DeviceRecord, name)
      EBBTIDE_READ(DeviceRecord, compute_capability) EBBTIDE_READ(DeviceRecord, total_bytes)
          EBBTIDE_READ(DeviceRecord, free_bytes) EBBTIDE_READ(DeviceRecord, granularity_bytes)
              EBBTIDE_READ(DeviceRecord, held_bytes) EBBTIDE_READ(DeviceRecord, limit_bytes)
                  EBBTIDE_READ(DeviceRecord, room_bytes) EBBTIDE_READ(DeviceRecord, peak_bytes);
  py::class_<CapabilityRecord>(module, "Capability") EBBTIDE_READ(CapabilityRecord, name) EBBTIDE_READ(
      CapabilityRecord, available) EBBTIDE_READ(CapabilityRecord, found) EBBTIDE_READ(CapabilityRecord, advice);
  py::class_<AllocationRecord>(module, "AllocationInfo") EBBTIDE_READ(AllocationRecord, address)
      EBBTIDE_READ(AllocationRecord, size_bytes) EBBTIDE_READ(AllocationRecord, resident_bytes)
          EBBTIDE_READ(AllocationRecord, stored_bytes) EBBTIDE_READ(AllocationRecord, device)
              EBBTIDE_READ(AllocationRecord, place) EBBTIDE_READ(AllocationRecord, backup)
                  EBBTIDE_READ(AllocationRecord, chunk_count) EBBTIDE_READ(AllocationRecord, is_trimmed)
                      EBBTIDE_READ(AllocationRecord, sequence) EBBTIDE_READ(AllocationRecord, tag)
                          EBBTIDE_READ(AllocationRecord, host_bytes) EBBTIDE_READ(AllocationRecord, is_paused);
  py::class_<TagRecord>(module, "TagInfo") EBBTIDE_READ(TagRecord, tag) EBBTIDE_READ(TagRecord, state)
      EBBTIDE_READ(TagRecord, lease_count) EBBTIDE_READ(TagRecord, allocation_count) EBBTIDE_READ(TagRecord, size_bytes)
          EBBTIDE_READ(TagRecord, resident_bytes) EBBTIDE_READ(TagRecord, stored_bytes)
              EBBTIDE_READ(TagRecord, dropped_bytes) EBBTIDE_READ(TagRecord, trimmed_bytes)
                  EBBTIDE_READ(TagRecord, retained_bytes) EBBTIDE_READ(TagRecord, host_bytes)
                      EBBTIDE_READ(TagRecord, left_bytes) EBBTIDE_READ(TagRecord, detached_bytes)
                          EBBTIDE_READ(TagRecord, backups) EBBTIDE_READ(TagRecord, is_hooked)
                              EBBTIDE_READ(TagRecord, ahead_bytes);
  py::class_<EventRow>(module, "Event") EBBTIDE_READ(EventRow, sequence) EBBTIDE_READ(EventRow, unix_seconds)
      EBBTIDE_READ(EventRow, seconds) EBBTIDE_READ(EventRow, kind) EBBTIDE_READ(EventRow, tags)
          EBBTIDE_READ(EventRow, bytes) EBBTIDE_READ(EventRow, copied) EBBTIDE_READ(EventRow, detail);
#undef EBBTIDE_READ
}

}  // namespace ebbtide::bindings
