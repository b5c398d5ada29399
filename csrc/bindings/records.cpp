#include "bindings/records.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>

#include "bindings/errors.h"

namespace py = pybind11;

namespace ebbtide::bindings {
namespace {

constexpr std::array kVerdicts = {"none",     "copied",  "changed", "clean",     "unused",
                                  "constant", "dropped", "on_host", "uncompared"};
constexpr std::array kPlaces = {"device", "host", "stored", "dropped", "mixed"};
constexpr std::array kKinds = {"pause", "resume", "swap", "prepare", "trim", "show", "promote", "demote"};
constexpr std::array kStates = {"resident", "paused", "partial", "empty"};

void add_row(void* rows, const ebbtide_report_row* row) {
  static_cast<std::vector<ebbtide_report_row>*>(rows)->push_back(*row);
}

const char* kind_name(const ReportRecord& report) { return kKinds.at(static_cast<size_t>(report.totals.kind)); }

// All but the rows at once, for the cost of one attribute.
py::tuple plain(const ReportRecord& report) {
  const auto& [tag, device, bytes, copied, skipped, clean, unused, constant] = report.totals.sum;
  return py::make_tuple(kind_name(report), bytes, copied, skipped, clean, unused, constant, report.totals.seconds,
                        report.totals.note);
}

py::list rows_of(const ReportRecord& report) {
  py::list made;
  for (const auto& [tag, device, bytes, copied, skipped, clean, unused, constant] : report.rows)
    made.append(py::make_tuple(tag, device, bytes, copied, skipped, clean, unused, constant));
  return made;
}

std::vector<std::tuple<std::string, int, uint64_t>> remaining_of(const ReportRecord& report) {
  std::vector<std::tuple<std::string, int, uint64_t>> made;
  for (const ebbtide_report_row& row : report.remaining) made.emplace_back(row.tag, row.device, row.bytes);
  std::sort(made.begin(), made.end());
  return made;
}

}  // namespace

ReportRecord::ReportRecord(ebbtide_report* report) : of(report, ebbtide_free_report) {
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  raise_if_failed(ebbtide_read_report(report, &totals, &error), error);
  raise_if_failed(ebbtide_visit_report(report, add_row, &rows, &error), error);
  raise_if_failed(ebbtide_visit_remaining(report, add_row, &remaining, &error), error);
}

StretchRow read_stretch(const ebbtide_stretch& stretch) {
  return {stretch.address, stretch.size_bytes, kPlaces.at(static_cast<size_t>(stretch.place)),
          kVerdicts.at(static_cast<size_t>(stretch.verdict))};
}

void register_records(py::module_& module) {
#define EBBTIDE_FIELD(name) .def_readonly(#name, &Struct::name)
  {
    using Struct = ebbtide_device_info;
    py::class_<Struct>(module, "DeviceInfo") EBBTIDE_FIELD(device) EBBTIDE_FIELD(compute_capability)
        EBBTIDE_FIELD(total_bytes) EBBTIDE_FIELD(free_bytes) EBBTIDE_FIELD(granularity_bytes) EBBTIDE_FIELD(held_bytes)
            EBBTIDE_FIELD(limit_bytes) EBBTIDE_FIELD(room_bytes) EBBTIDE_FIELD(peak_bytes)
                .def_property_readonly("name", [](const Struct& info) { return std::string(info.name); })
                .def_property_readonly("uuid", [](const Struct& info) {
                  return py::bytes(reinterpret_cast<const char*>(info.uuid), sizeof info.uuid);
                });
  }
  {
    using Struct = ebbtide_allocation_info;
    py::class_<Struct>(module, "AllocationInfo") EBBTIDE_FIELD(address) EBBTIDE_FIELD(size_bytes)
        EBBTIDE_FIELD(resident_bytes) EBBTIDE_FIELD(stored_bytes) EBBTIDE_FIELD(device) EBBTIDE_FIELD(backup)
            EBBTIDE_FIELD(chunk_count) EBBTIDE_FIELD(is_trimmed) EBBTIDE_FIELD(is_exportable) EBBTIDE_FIELD(is_kept)
                EBBTIDE_FIELD(is_lent) EBBTIDE_FIELD(is_paused) EBBTIDE_FIELD(sequence) EBBTIDE_FIELD(host_bytes)
                    .def_property_readonly("tag", [](const Struct& info) { return std::string(info.tag); })
                    .def_property_readonly(
                        "place", [](const Struct& info) { return kPlaces.at(static_cast<size_t>(info.place)); });
  }
  {
    using Struct = ebbtide_tag_info;
#define EBBTIDE_AMOUNT(name) EBBTIDE_FIELD(name)
#define EBBTIDE_INNER_AMOUNT(name)
    py::class_<Struct>(module, "TagInfo")
#include "core/memory/amounts.def"
        EBBTIDE_FIELD(tag) EBBTIDE_FIELD(lease_count) EBBTIDE_FIELD(backups) EBBTIDE_FIELD(is_hooked)
            .def_property_readonly("state",
                                   [](const Struct& info) { return kStates.at(static_cast<size_t>(info.state)); });
#undef EBBTIDE_INNER_AMOUNT
#undef EBBTIDE_AMOUNT
  }
#undef EBBTIDE_FIELD
#define EBBTIDE_TOTAL(name, field) \
  .def_property_readonly(name, [](const ReportRecord& report) { return report.totals.field; })
  py::class_<ReportRecord>(module, "Report") EBBTIDE_TOTAL("bytes", sum.bytes) EBBTIDE_TOTAL("copied", sum.copied)
      EBBTIDE_TOTAL("skipped", sum.skipped) EBBTIDE_TOTAL("clean", sum.clean) EBBTIDE_TOTAL("unused", sum.unused)
          EBBTIDE_TOTAL("constant", sum.constant) EBBTIDE_TOTAL("seconds", seconds) EBBTIDE_TOTAL("note", note)
              .def_property_readonly("kind", &kind_name)
              .def_property_readonly("rows", &rows_of)
              .def_property_readonly("remaining", &remaining_of)
              .def_property_readonly("plain", &plain);
#undef EBBTIDE_TOTAL
}

}  // namespace ebbtide::bindings
