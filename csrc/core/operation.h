#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/saver.h"

// An operation in two phases. claim() selects, checks and takes whatever will be needed; it can be abandoned without a trace. commit() moves the bytes.
//
// It is made of parts: a pause has one PausePart, a resume one ResumePart; all parts are claimed in one step, so that two operations never wait for each other.
//
// Invariant 3: commit() that fails before the first byte is given up leaves everything as it was; after that every chunk is whole somewhere, and the same operation, claimed
// again, finishes it.
namespace ebbtide {

struct ReportRow {
  uint64_t bytes = 0;    // device bytes freed or claimed
  uint64_t copied = 0;   // bytes that crossed the bus
  uint64_t skipped = 0;  // bytes with a backup that needed no copy
};
using ReportRows = std::map<std::pair<std::string, int>, ReportRow>;  // by tag and device

struct Report {
  OperationKind kind = OperationKind::kPause;
  double seconds = 0;
  ReportRows rows;
  ReportRows left;  // bytes still on devices, after the operation
  ReportRow totals() const;
};

using Allocations = std::vector<std::shared_ptr<Allocation>>;

// What one kind of move does with the allocations that the operation holds for it.
class OperationPart {
 public:
  explicit OperationPart(Saver& saver) : saver_(saver) {}
  OperationPart(const OperationPart&) = delete;
  OperationPart& operator=(const OperationPart&) = delete;
  virtual ~OperationPart() = default;

  // Takes what run() will need. Throws with nothing changed that settle() does not undo.
  virtual void prepare(const Allocations& allocations) = 0;
  // Whether kernels may still use what it moves: then the devices are synchronised before run().
  virtual bool takes_memory_away() const = 0;
  // Moves.
  virtual void run() = 0;
  // After run, also after a failed or omitted one: puts back what was taken and not used, and drops every reference to allocations.
  virtual void settle() noexcept = 0;

  const ReportRows& rows() const { return rows_; }
  bool has_given_up_any() const { return has_given_up_any_; }

 protected:
  Saver& saver() { return saver_; }
  ReportRow& row(const Allocation& allocation) { return rows_[{allocation.tag->name, allocation.device}]; }
  // From now on a failure leaves the operation midway.
  void mark_given_up() { has_given_up_any_ = true; }

 private:
  Saver& saver_;
  ReportRows rows_;
  bool has_given_up_any_ = false;
};

class Operation {
 public:
  static std::unique_ptr<Operation> claim(Saver& saver, OperationKind kind, const OperationRequest& request);
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  ~Operation() { abandon(); }

  // Once.
  Report commit();
  void abandon() noexcept { finish(Outcome::kUntouched); }

 private:
  Operation(Saver& saver, OperationKind kind, CaptureGate::Permit permit);
  void prepare();
  void run();
  void finish(Outcome outcome) noexcept;
  void fail(Outcome outcome, const char* reason) noexcept;
  void record(const char* kind, const char* detail) noexcept;
  bool has_given_up_any() const;

  Saver& saver_;
  CaptureGate::Permit permit_;
  Selection selection_;
  std::vector<std::unique_ptr<OperationPart>> parts_;  // parallel to selection_.parts
  Report report_;
  std::string tag_names_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  bool is_finished_ = false;
};

}  // namespace ebbtide
