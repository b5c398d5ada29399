#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "api/ebbtide.h"

// The rows of ebbtide.h's visitors, for Python: structs that own their text as they are, others as tuples.
namespace ebbtide::bindings {

// A report, read at once: a forked child may look at it, too. Its texts live as long as `of`.
struct ReportRecord {
  // Takes ownership of the report, even if it throws.
  explicit ReportRecord(ebbtide_report* report);
  std::shared_ptr<ebbtide_report> of;
  ebbtide_report_totals totals{};
  std::vector<ebbtide_report_row> rows, remaining;
};

using StretchRow = std::tuple<uint64_t, uint64_t, std::string, std::string>;  // address, bytes, place, verdict
StretchRow read_stretch(const ebbtide_stretch& stretch);
void register_records(pybind11::module_& module);

}  // namespace ebbtide::bindings
