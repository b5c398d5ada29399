#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "api/ebbtide.h"

// Plain copies of the structs of ebbtide.h, and their registration as Python classes.
namespace ebbtide::bindings {

struct Row {
  std::string tag;
  int device;
  uint64_t bytes, copied, skipped, clean, unused, constant;
};
// Bytes on a device; tag as long as the report.
struct LeftRow {
  const char* tag;
  int device;
  uint64_t bytes;
};
struct ReportRecord {
  std::string kind;
  uint64_t bytes = 0, copied = 0, skipped = 0, clean = 0, unused = 0, constant = 0;
  double seconds = 0;
  std::string note;
  std::vector<Row> rows;
  std::vector<LeftRow> left_rows;  // of every tag; rows for Python are made on demand
  std::shared_ptr<ebbtide_report> of;
  std::vector<Row> left() const;
  // All but the rows at once, for the cost of one attribute.
  using Plain =
      std::tuple<std::string, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, double, std::string>;
  Plain plain() const;
};
struct DeviceRecord {
  int device;
  std::string name;
  int compute_capability;
  uint64_t total_bytes, free_bytes, granularity_bytes, held_bytes, limit_bytes, room_bytes, peak_bytes;
};
struct CapabilityRecord {
  std::string name;
  bool available;
  std::string found, advice;
};
struct AllocationRecord {
  uint64_t address, size_bytes, resident_bytes, stored_bytes;
  int device;
  std::string place;
  int backup, chunk_count;
  bool is_trimmed;
  uint64_t sequence;
  std::string tag;
  uint64_t host_bytes;
  bool is_paused;
};
struct TagRecord {
  std::string tag, state;
  int lease_count;
  uint64_t allocation_count, size_bytes, resident_bytes, stored_bytes, dropped_bytes, trimmed_bytes, retained_bytes,
      host_bytes, left_bytes, detached_bytes;
  int backups;
  bool is_hooked;
  uint64_t ahead_bytes;
};
struct EventRow {
  uint64_t sequence;
  double unix_seconds, seconds;
  std::string kind, tags;
  uint64_t bytes, copied;
  std::string detail;
};

// Takes ownership of the report, even if it throws.
ReportRecord read_report(ebbtide_report* report);
AllocationRecord read_allocation(const ebbtide_allocation_info& info);
using StretchRow = std::tuple<uint64_t, uint64_t, std::string, std::string>;  // address, bytes, place, verdict
StretchRow read_stretch(const ebbtide_stretch& stretch);
TagRecord read_tag(const ebbtide_tag_info& info);
EventRow read_event(const ebbtide_event& event);

void register_records(pybind11::module_& module);

}  // namespace ebbtide::bindings
