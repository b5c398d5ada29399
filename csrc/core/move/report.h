#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/registry/registry.h"

namespace ebbtide {

// The numbers are those of the C API, where it has the kind. kSeparate ends the sharing of handles, for a trim;
// kCopyAhead is one step of many, which report as a prepare does.
enum class OperationKind {
  kPause = 0,
  kResume = 1,
  kSwap = 2,
  kPrepare = 3,
  kTrim = 4,
  kPromote = 6,
  kDemote = 7,
  kSeparate = 8,
  kCopyAhead = 9
};

struct ReportRow {
  uint64_t bytes = 0;   // device bytes freed or claimed
  uint64_t copied = 0;  // bytes that crossed the bus
  // Bytes with a backup that needed no copy, by reason.
  uint64_t clean = 0;     // the store holds them already
  uint64_t unused = 0;    // not in use
  uint64_t constant = 0;  // one repeated value
  uint64_t skipped() const { return clean + unused + constant; }
  bool is_empty() const { return bytes + copied + skipped() == 0; }
  ReportRow& operator+=(const ReportRow& other);
};
using ReportRows = std::map<std::pair<std::string, int>, ReportRow>;  // by tag and device

ReportRow total_of(const ReportRows& rows);

struct Report {
  OperationKind kind = OperationKind::kPause;
  double seconds = 0;
  ReportRows rows;
  std::string note;  // why a promotion stopped before all was on the device
  // The memory on devices after the operation.
  std::shared_ptr<const std::vector<HeldBytes>> held = std::make_shared<const std::vector<HeldBytes>>();
  ReportRows remaining() const;  // the same, as rows
  ReportRow totals() const { return total_of(rows); }
};

}  // namespace ebbtide
