#include "core/operation/operation.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <set>
#include <thread>

#include "base/error.h"
#include "core/ahead/copy_ahead.h"
#include "core/move/preparation.h"
#include "core/move/relocations.h"
#include "core/operation/swap.h"
#include "core/pause/trim.h"
#include "core/resume/resume.h"
#include "core/state/shortage.h"
#include "driver/context.h"

namespace ebbtide {
namespace {

// The refusals that need no look at a tag.
CaptureGate::Permit enter(Core& core, OperationKind kind, const OperationRequest& request) {
  require_not_forked();
  if (request.backup && *request.backup != BackupKind::kNone) require_store(*request.backup);
  for (const auto& [tag, kind] : request.backup_by_tag) {
    if (kind != BackupKind::kNone) require_store(kind);
  }
  if (kind == OperationKind::kSwap) require_apart(request);
  auto permit = core.capture_gate.try_enter();
  if (!permit) {
    throw CaptureError(
        "a stream capture is under way: pause and resume would break it; do it before or after the capture");
  }
  return std::move(*permit);
}

void require_no_capture(const std::set<int>& devices) {
  for (const int device : devices) {
    if (!is_capture_visible(device, nullptr)) continue;
    throw CaptureError("a stream of device " + std::to_string(device) +
                       " captures: pause and resume would break the capture; do it before or after");
  }
}

// For events, by the kind's number.
constexpr const char* kNames[] = {"pause", "resume",  "swap",   "prepare",  "trim",
                                  "",      "promote", "demote", "separate", "copy_ahead"};

}  // namespace

Operation::Operation(Core& core, OperationKind kind, OperationRequest request, CaptureGate::Permit permit)
    : core_(core), kind_(kind), request_(std::move(request)), permit_(std::move(permit)) {
  add_moves();
}

// The one place that knows the moves of each kind.
void Operation::add_moves() {
  const auto add = [&](auto move) -> auto& {
    auto& added = *move;
    moves_.push_back(std::move(move));
    return added;
  };
  if (request_.make_move) {
    moves_.push_back(request_.make_move(core_, request_));
    return;
  }
  switch (kind_) {
    case OperationKind::kPause: add(std::make_unique<Pause>(core_, request_)); return;
    case OperationKind::kTrim: add(std::make_unique<Trim>(core_, request_)); return;
    case OperationKind::kResume: add(std::make_unique<Resume>(core_, request_, request_.tags)); return;
    case OperationKind::kSwap:
      add(std::make_unique<SwapIn>(core_, request_, add(std::make_unique<SwapOut>(core_, request_))));
      return;
    case OperationKind::kPrepare: add(std::make_unique<Preparation>(core_, request_)); return;
    case OperationKind::kPromote: add(std::make_unique<Promotion>(core_, request_)); return;
    case OperationKind::kDemote: add(std::make_unique<Demotion>(core_, request_)); return;
    case OperationKind::kCopyAhead: add(std::make_unique<CopyAhead>(core_, request_)); return;
    case OperationKind::kSeparate: add(std::make_unique<Separation>(core_, request_)); return;
  }
  throw InvalidArgument("there is no operation of kind " + std::to_string(static_cast<int>(kind_)));
}

std::vector<TagClaim> Operation::claims() const {
  std::vector<TagClaim> claims;
  for (const auto& move : moves_) {
    claims.push_back(move->claim());
    claims.back().asks_borrowers = bool(request_.before_moving);
  }
  return claims;
}

std::unique_ptr<Operation> Operation::claim(Core& core, OperationKind kind, OperationRequest request) {
  auto permit = enter(core, kind, request);
  give_back_caches(core);
  const uint64_t peer_generation = core.peers.refresh(true);
  // Made before anything is held: from the claim on, its destructor lets go whatever happens.
  std::unique_ptr<Operation> operation(new Operation(core, kind, std::move(request), std::move(permit)));
  operation->peer_generation_ = peer_generation;
  operation->hold_tags();
  try {
    operation->prepare();
  } catch (const std::exception& error) {
    operation->fail(error.what());
    throw;
  }
  return operation;
}

// Shared handles show only once the tags are held. So they are then claimed anew, with all that may share.
void Operation::hold_tags() {
  selection_ = core_.registry.claim(claims());
  // A promotion moves host memory, which no handle shares.
  const bool releases_handles = moves_.front()->takes_memory_away() && kind_ != OperationKind::kPromote;
  must_separate_ = releases_handles && kind_ != OperationKind::kSeparate && !request_.tags.addresses.empty() &&
                   is_any_shared(selection_.groups.front().allocations);
  if (!must_separate_) return;
  let_go(Outcome::kUntouched);
  moves_.push_back(std::make_unique<Separation>(core_, request_));
  selection_ = core_.registry.claim(claims());
}

std::vector<std::string> Operation::preview(Core& core, OperationKind kind, OperationRequest request) {
  auto permit = enter(core, kind, request);
  Operation asked(core, kind, std::move(request), std::move(permit));
  asked.is_finished_ = true;  // it holds no tags that it must let go
  std::vector<std::string> names;
  std::set<const Tag*> seen;
  std::set<int> devices;
  core.registry.preview(asked.claims(), [&](size_t index, const Allocation& allocation) {
    devices.insert(allocation.device);
    if (asked.moves_[index]->moves_content(allocation) && seen.insert(allocation.tag).second)
      names.push_back(allocation.tag->name);
  });
  require_no_capture(devices);
  return names;
}

// For the event, of which there are many: of many tags the first ones.
void Operation::note_tag_names() {
  constexpr size_t kMostBytes = 1024;
  size_t named = 0;
  for (const Tag* tag : selection_.tags) {
    if (tag_names_.size() > kMostBytes) break;
    tag_names_ += (named++ == 0 ? "" : ", ") + tag->name;
  }
  if (named < selection_.tags.size()) tag_names_ += ", and " + std::to_string(selection_.tags.size() - named) + " more";
}

void Operation::prepare() {
  note_tag_names();
  // Memory that was free when the caller looked may have been handed out since.
  if (selection_.last_lease > request_.unused_as_of) request_.unused.clear();
  std::set<int> devices;
  for (const auto& group : selection_.groups) {
    for (const auto& allocation : group.allocations) devices.insert(allocation->device);
  }
  require_no_capture(devices);
  if (must_separate_) separate();
  for (size_t index = 0; index < moves_.size(); ++index) moves_[index]->prepare(selection_.groups[index].allocations);
}

// An event of its own.
void Operation::separate() {
  Move& separation = *moves_.back();
  separation.prepare(selection_.groups.back().allocations);
  run({&moves_.back(), 1});
  separation.settle();
  record("", "");
  moves_.pop_back();
  // Its allocations stay held. How the rest ends is told by the others.
  selection_.groups.back().tags.clear();
  must_separate_ = false;
}

void Operation::run_devices(std::span<const std::unique_ptr<Move>> moves) {
  struct Share {
    Move* move;
    int device;
  };
  std::vector<Share> shares;  // the leaving side first, so that one after the other works as well
  for (const auto& move : moves) {
    for (const int device : move->devices()) shares.push_back({move.get(), device});
  }
  std::mutex mutex;
  std::exception_ptr first_error;
  const auto run_share = [&](const Share& share) {
    try {
      const ContextScope scope(share.device);
      share.move->run_device(share.device);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (first_error == nullptr) first_error = std::current_exception();
    }
    share.move->end_device(share.device);
  };
  {
    std::vector<std::jthread> threads;
    size_t next = 1;
    try {
      for (; next < shares.size(); ++next) threads.emplace_back(run_share, shares[next]);
    } catch (...) {
      // The system starts no more threads: this one does the rest.
    }
    if (!shares.empty()) run_share(shares.front());
    for (; next < shares.size(); ++next) run_share(shares[next]);
  }
  if (first_error != nullptr) std::rethrow_exception(first_error);
}

void Operation::run(std::span<const std::unique_ptr<Move>> moves) {
  std::set<int> devices;
  for (const auto& move : moves) {
    if (!move->takes_memory_away()) continue;
    for (const int device : move->devices()) devices.insert(device);
  }
  for (const int device : devices) synchronize_device(device);
  run_devices(moves);
  for (const auto& move : moves) move->run_last();
}

std::unique_ptr<Arrivals> Operation::launch() {
  auto* const resume = dynamic_cast<Resume*>(moves_.front().get());
  if (resume == nullptr) throw InvalidArgument("only a resume can move its bytes later");
  try {
    return resume->launch();
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  }
}

std::vector<Report> Operation::commit() {
  if (is_finished_) throw StateError("this operation is over");
  try {
    if (request_.before_moving && !request_.before_moving()) throw StateError("the caller has stopped it");
    run(moves_);
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  }
  finish(Outcome::kWhole);
  const auto held = std::make_shared<const std::vector<HeldBytes>>(core_.registry.held());
  std::vector<Report> reports;
  for (const auto& move : moves_) {
    Report& report = reports.emplace_back();
    report.kind = move->kind();
    report.seconds = seconds();
    report.note = move->note();
    report.held = held;
    for (const auto& [key, row] : move->rows()) {
      if (!row.is_empty()) report.rows.emplace(key, row);
    }
    move->count(core_.counters, report.totals());
  }
  record("", "");
  return reports;
}

void Operation::record(const char* suffix, const char* detail) noexcept {
  if (kind_ == OperationKind::kCopyAhead) return;  // a part of something that is an event
  try {
    ReportRow total;
    for (const auto& move : moves_) total += total_of(move->rows());
    const OperationKind kind = must_separate_ ? OperationKind::kSeparate : kind_;
    core_.events.add({.seconds = seconds(),
                      .kind = std::string(kNames[static_cast<size_t>(kind)]) + suffix,
                      .tags = tag_names_,
                      .bytes = total.bytes,
                      .copied = total.copied,
                      .detail = detail});
  } catch (...) {
    // No memory for the event's strings: the operation itself is not touched by that.
  }
}

double Operation::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

void Operation::let_go(Outcome outcome) noexcept {
  core_.deferred_frees.destroy_all(core_.registry.release(selection_, outcome));
}

void Operation::finish(Outcome outcome) noexcept {
  if (is_finished_) return;
  is_finished_ = true;
  for (const auto& move : moves_) move->settle();
  let_go(outcome);
  core_.registry.ahead_steps.end(selection_.ahead_step);
  core_.peers.catch_up_after_hold(peer_generation_);
}

void Operation::fail(const char* reason) noexcept {
  const bool is_midway =
      std::any_of(moves_.begin(), moves_.end(), [](const auto& move) { return move->has_released_any(); });
  // A failed separation is no trim and no pause yet.
  for (Selection::Group& group : selection_.groups) {
    if (must_separate_) group.claim.marks_trimmed = group.claim.counts_as_pause = false;
  }
  finish(is_midway ? Outcome::kMidway : Outcome::kUntouched);
  if (kind_ != OperationKind::kCopyAhead) ++core_.counters.operation_failures;
  record("_failed", reason);
}

}  // namespace ebbtide
