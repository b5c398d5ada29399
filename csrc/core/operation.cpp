#include "core/operation.h"

#include <set>

#include "base/error.h"
#include "core/pause.h"
#include "core/resume.h"
#include "driver/context.h"

namespace ebbtide {

ReportRow Report::totals() const {
  ReportRow total;
  for (const auto& [key, row] : rows) {
    total.bytes += row.bytes;
    total.copied += row.copied;
    total.skipped += row.skipped;
  }
  return total;
}

Operation::Operation(Saver& saver, OperationKind kind, CaptureGate::Permit permit)
    : saver_(saver), permit_(std::move(permit)) {
  report_.kind = kind;
  if (kind == OperationKind::kPause) {
    parts_.push_back(std::make_unique<PausePart>(saver));
  } else {
    parts_.push_back(std::make_unique<ResumePart>(saver));
  }
}

std::unique_ptr<Operation> Operation::claim(Saver& saver, OperationKind kind, const OperationRequest& request) {
  if (request.backup && *request.backup != BackupKind::kNone) store_of(*request.backup);
  auto permit = saver.capture_gate.try_enter();
  if (!permit) {
    throw StateError(
        "a stream capture is under way: pause and resume would break it; do it before or after the capture");
  }
  saver.give_back_caches();
  // Made before anything is held: from the claim on, its destructor lets go whatever happens.
  std::unique_ptr<Operation> operation(new Operation(saver, kind, std::move(*permit)));
  if (kind == OperationKind::kPause) static_cast<PausePart&>(*operation->parts_.front()).use_backup(request.backup);
  const ClaimPart part{kind, request.tags};
  operation->selection_ = saver.registry.claim({&part, 1});
  try {
    operation->prepare();
  } catch (const std::exception& error) {
    operation->fail(Outcome::kUntouched, error.what());
    throw;
  }
  return operation;
}

void Operation::prepare() {
  for (const Tag* tag : selection_.tags) tag_names_ += (tag_names_.empty() ? "" : ", ") + tag->name;
  std::set<int> devices;
  for (const auto& part : selection_.parts) {
    for (const auto& allocation : part.allocations) devices.insert(allocation->device);
  }
  for (const int device : devices) {
    if (!is_capture_visible(device, nullptr)) continue;
    throw StateError("a stream of device " + std::to_string(device) +
                     " captures: pause and resume would break the capture; do it before or after");
  }
  for (size_t index = 0; index < parts_.size(); ++index) parts_[index]->prepare(selection_.parts[index].allocations);
}

void Operation::run() {
  std::set<int> devices;
  for (size_t index = 0; index < parts_.size(); ++index) {
    if (!parts_[index]->takes_memory_away()) continue;
    for (const auto& allocation : selection_.parts[index].allocations) devices.insert(allocation->device);
  }
  for (const int device : devices) synchronize_device(device);
  for (const auto& part : parts_) part->run();
}

bool Operation::has_given_up_any() const {
  for (const auto& part : parts_) {
    if (part->has_given_up_any()) return true;
  }
  return false;
}

void Operation::record(const char* kind, const char* detail) noexcept {
  report_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const ReportRow total = report_.totals();
  try {
    saver_.events.add({.seconds = report_.seconds,
                       .kind = kind,
                       .tags = tag_names_,
                       .bytes = total.bytes,
                       .copied = total.copied,
                       .detail = detail});
  } catch (...) {
    // No memory for the event's strings: the operation itself is not touched by that.
  }
}

void Operation::finish(Outcome outcome) noexcept {
  if (is_finished_) return;
  is_finished_ = true;
  for (const auto& part : parts_) part->settle();
  saver_.deferred_frees.destroy_all(saver_.registry.release(selection_, outcome));
}

void Operation::fail(Outcome outcome, const char* reason) noexcept {
  finish(outcome);
  ++saver_.counters.operation_failures;
  record(report_.kind == OperationKind::kPause ? "pause_failed" : "resume_failed", reason);
}

Report Operation::commit() {
  if (is_finished_) throw StateError("this operation is over");
  const bool is_pause = report_.kind == OperationKind::kPause;
  try {
    run();
  } catch (const std::exception& error) {
    fail(has_given_up_any() ? Outcome::kMidway : Outcome::kUntouched, error.what());
    throw;
  }
  finish(Outcome::kWhole);
  for (const auto& part : parts_) report_.rows.insert(part->rows().begin(), part->rows().end());
  const ReportRow total = report_.totals();
  ++(is_pause ? saver_.counters.pauses : saver_.counters.resumes);
  (is_pause ? saver_.counters.bytes_paused : saver_.counters.bytes_resumed) += total.bytes;
  (is_pause ? saver_.counters.bytes_to_host : saver_.counters.bytes_to_device) += total.copied;
  record(is_pause ? "pause" : "resume", "");
  saver_.registry.visit_tags([&](const Tag& tag) {
    for (const auto& [sequence, allocation] : tag.allocations) {
      if (const size_t bytes = allocation->device_bytes()) report_.left[{tag.name, allocation->device}].bytes += bytes;
    }
  });
  return std::move(report_);
}

}  // namespace ebbtide
