#include "core/move/report.h"

namespace ebbtide {

ReportRow& ReportRow::operator+=(const ReportRow& other) {
  bytes += other.bytes;
  copied += other.copied;
  clean += other.clean;
  unused += other.unused;
  constant += other.constant;
  return *this;
}

ReportRow total_of(const ReportRows& rows) {
  ReportRow total;
  for (const auto& [key, row] : rows) total += row;
  return total;
}

ReportRows Report::remaining() const {
  ReportRows rows;
  for (const HeldBytes& each : *held) {
    if (each.bytes > 0) rows[{each.tag->name, each.device}].bytes = each.bytes;
  }
  return rows;
}

}  // namespace ebbtide
