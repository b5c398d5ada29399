#include "core/operation/operation.h"

#include <algorithm>
#include <set>
#include <thread>

#include "base/error.h"
#include "core/pause/pause.h"
#include "core/move/prepare.h"
#include "core/move/promote.h"
#include "core/resume/resume.h"
#include "core/move/separate.h"
#include "driver/context.h"

namespace ebbtide {
namespace {

// Beyond the larger of the two sides of a swap, so that both directions of the bus have something to do from the start.
constexpr uint64_t kSwapMarginBytes = 256 * kMiB;

const char* name_of(OperationKind kind) {
  switch (kind) {
    case OperationKind::kPause: return "pause";
    case OperationKind::kResume: return "resume";
    case OperationKind::kSwap: return "swap";
    case OperationKind::kPrepare: return "prepare";
    case OperationKind::kPromote: return "promote";
    case OperationKind::kSeparate: return "separate";
    default: return "trim";
  }
}

void require_apart(const OperationRequest& request) {
  for (const std::string& name : request.tags.names) {
    const auto& others = request.resume_tags.names;
    if (std::find(others.begin(), others.end(), name) != others.end())
      throw InvalidArgument("'" + name + "' can't leave and come back in one swap");
  }
  if (request.tags.names.empty() || request.resume_tags.names.empty())
    throw InvalidArgument("a swap names the tags that leave and those that come back");
}

}  // namespace

ReportRow& ReportRow::operator+=(const ReportRow& other) {
  bytes += other.bytes;
  copied += other.copied;
  clean += other.clean;
  unused += other.unused;
  constant += other.constant;
  return *this;
}

ReportRow Report::totals() const {
  ReportRow total;
  for (const auto& [key, row] : rows) total += row;
  return total;
}

ReportRows Report::left() const {
  ReportRows rows;
  for (const HeldBytes& each : *held) {
    if (each.bytes > 0) rows[{each.tag->name, each.device}].bytes = each.bytes;
  }
  return rows;
}

Operation::Operation(Saver& saver, OperationKind kind, OperationRequest request, CaptureGate::Permit permit)
    : saver_(saver), kind_(kind), request_(std::move(request)), permit_(std::move(permit)) {}

std::vector<ClaimPart> Operation::add_parts() {
  Exchanges* const exchanges = kind_ == OperationKind::kSwap ? &exchanges_ : nullptr;
  std::vector<ClaimPart> claims;
  if (kind_ == OperationKind::kPause || kind_ == OperationKind::kSwap || kind_ == OperationKind::kTrim) {
    const bool is_trim = kind_ == OperationKind::kTrim;
    parts_.push_back(std::make_unique<PausePart>(saver_, request_, exchanges, is_trim));
    claims.push_back({is_trim ? OperationKind::kTrim : OperationKind::kPause, request_.tags});
  }
  if (kind_ == OperationKind::kResume || kind_ == OperationKind::kSwap) {
    parts_.push_back(std::make_unique<ResumePart>(saver_, request_, exchanges));
    claims.push_back({OperationKind::kResume, exchanges == nullptr ? request_.tags : request_.resume_tags});
  }
  if (kind_ == OperationKind::kPrepare) {
    parts_.push_back(std::make_unique<PreparePart>(saver_));
    claims.push_back({OperationKind::kPrepare, request_.tags});
  }
  if (kind_ == OperationKind::kPromote) {
    parts_.push_back(std::make_unique<PromotePart>(saver_));
    claims.push_back({OperationKind::kPromote, request_.tags});
  }
  if (kind_ == OperationKind::kSeparate) {
    parts_.push_back(std::make_unique<SeparatePart>(saver_, request_));
    claims.push_back({OperationKind::kSeparate, request_.tags});
  }
  return claims;
}

std::unique_ptr<Operation> Operation::claim(Saver& saver, OperationKind kind, OperationRequest request) {
  if (request.backup && *request.backup != BackupKind::kNone) store_of(*request.backup);
  if (kind == OperationKind::kSwap) require_apart(request);
  auto permit = saver.capture_gate.try_enter();
  if (!permit) {
    throw StateError(
        "a stream capture is under way: pause and resume would break it; do it before or after the capture");
  }
  saver.give_back_caches();
  const uint64_t peer_generation = saver.peers.refresh(true);
  // Made before anything is held: from the claim on, its destructor lets go whatever happens.
  std::unique_ptr<Operation> operation(new Operation(saver, kind, std::move(request), std::move(*permit)));
  operation->peer_generation_ = peer_generation;
  operation->selection_ = saver.registry.claim(operation->add_parts());
  try {
    operation->prepare();
  } catch (const std::exception& error) {
    operation->fail(Outcome::kUntouched, error.what());
    throw;
  }
  return operation;
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
  for (const auto& part : selection_.parts) {
    for (const auto& allocation : part.allocations) devices.insert(allocation->device);
  }
  for (const int device : devices) {
    if (!is_capture_visible(device, nullptr)) continue;
    throw StateError("a stream of device " + std::to_string(device) +
                     " captures: pause and resume would break the capture; do it before or after");
  }
  if (request_.moved != nullptr) note_moved();
  for (size_t index = 0; index < parts_.size(); ++index) parts_[index]->prepare(selection_.parts[index].allocations);
  if (kind_ == OperationKind::kSwap) open_exchanges();
}

// Ahead, while it may still fail.
void Operation::note_moved() {
  for (const auto& part : selection_.parts) {
    if (part.kind != OperationKind::kPause) continue;
    for (const auto& allocation : part.allocations) request_.moved->note(*allocation, allocation->tag->name);
  }
}

void Operation::forget_unmoved() noexcept {
  for (const auto& part : selection_.parts) {
    if (part.kind != OperationKind::kPause) continue;
    for (const auto& allocation : part.allocations) {
      if (!allocation->wants_resume()) request_.moved->forget(*allocation);
    }
  }
}

// Memory for what the coming side needs beyond the leaving one's, before anything moves.
void Operation::open_exchanges() {
  const auto leaving = static_cast<PausePart&>(*parts_.front()).leaving_bytes();
  const auto returning = static_cast<ResumePart&>(*parts_.back()).returning_sizes();
  std::set<int> devices;
  for (const auto& part : parts_) {
    for (const int device : part->devices()) devices.insert(device);
  }
  for (const int device : devices) {
    const uint64_t leaving_bytes = leaving.contains(device) ? leaving.at(device) : 0;
    const auto sizes = returning.contains(device) ? returning.at(device) : std::vector<uint64_t>{};
    exchanges_[device] = open_exchange(saver_, device, leaving_bytes, sizes);
  }
}

void Operation::run_devices() {
  struct Share {
    OperationPart* part;
    int device;
  };
  std::vector<Share> shares;  // what leaves before what comes back, so that one after the other works as well
  for (const auto& part : parts_) {
    for (const int device : part->devices()) shares.push_back({part.get(), device});
  }
  std::mutex mutex;
  std::exception_ptr first_error;
  const auto run_share = [&](const Share& share) {
    try {
      const ContextScope scope(share.device);
      share.part->run_device(share.device);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (first_error == nullptr) first_error = std::current_exception();
    }
    // However the giving side of a swap ended, the other does not wait for more.
    if (share.part == parts_.front().get() && exchanges_.contains(share.device)) exchanges_.at(share.device)->close();
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

void Operation::run() {
  std::set<int> devices;
  for (const auto& part : parts_) {
    if (!part->takes_memory_away()) continue;
    for (const int device : part->devices()) devices.insert(device);
  }
  for (const int device : devices) synchronize_device(device);
  run_devices();
  for (const auto& part : parts_) part->run_last();
}

std::unique_ptr<Arrivals> Operation::map_ahead() {
  if (kind_ != OperationKind::kResume) throw InvalidArgument("only a resume can move its bytes later");
  try {
    return static_cast<ResumePart&>(*parts_.front()).map_ahead();
  } catch (const std::exception& error) {
    fail(has_given_up_any() ? Outcome::kMidway : Outcome::kUntouched, error.what());
    throw;
  }
}

bool Operation::has_given_up_any() const {
  return std::any_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->has_given_up_any(); });
}

void Operation::record(const char* suffix, const char* detail, double seconds) noexcept {
  try {
    ReportRow total;
    for (const auto& part : parts_) {
      for (const auto& [key, row] : part->rows()) total += row;
    }
    saver_.events.add({.seconds = seconds,
                       .kind = std::string(name_of(kind_)) + suffix,
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

void Operation::finish(Outcome outcome) noexcept {
  if (is_finished_) return;
  is_finished_ = true;
  for (const auto& part : parts_) part->settle();
  exchanges_.clear();
  if (request_.moved != nullptr) forget_unmoved();
  saver_.deferred_frees.destroy_all(saver_.registry.release(selection_, outcome));
  saver_.peers.catch_up_after_hold(peer_generation_);
}

void Operation::fail(Outcome outcome, const char* reason) noexcept {
  finish(outcome);
  ++saver_.counters.operation_failures;
  record("_failed", reason, seconds());
}

// What a part did, for the counters and the caller.
Report Operation::report_of(const OperationPart& part, bool is_leaving, double seconds) {
  Report report;
  report.kind = kind_ != OperationKind::kSwap ? kind_ : is_leaving ? OperationKind::kPause : OperationKind::kResume;
  report.seconds = seconds;
  for (const auto& [key, row] : part.rows()) {
    if (!row.is_empty()) report.rows.emplace(key, row);
  }
  const ReportRow total = report.totals();
  Counters& counters = saver_.counters;
  if (report.kind == OperationKind::kPause) {
    ++counters.pauses;
    counters.bytes_paused += total.bytes;
    counters.bytes_to_host += total.copied;
    counters.bytes_clean += total.clean;
    counters.bytes_unused += total.unused;
    counters.bytes_constant += total.constant;
  } else if (report.kind == OperationKind::kResume) {
    ++counters.resumes;
    counters.bytes_resumed += total.bytes;
    counters.bytes_to_device += total.copied;
  } else if (report.kind == OperationKind::kPromote) {
    counters.bytes_promoted += total.bytes;
  }
  return report;
}

std::vector<Report> Operation::commit() {
  if (is_finished_) throw StateError("this operation is over");
  try {
    run();
  } catch (const std::exception& error) {
    fail(has_given_up_any() ? Outcome::kMidway : Outcome::kUntouched, error.what());
    throw;
  }
  finish(Outcome::kWhole);
  const double taken = seconds();
  std::vector<Report> reports;
  for (const auto& part : parts_) reports.push_back(report_of(*part, part == parts_.front(), taken));
  record("", "", taken);
  const auto held = std::make_shared<const std::vector<HeldBytes>>(saver_.registry.held());
  for (Report& report : reports) report.held = held;
  return reports;
}

std::vector<bool> unused_blocks(const Saver& saver, const OperationRequest& request, const Allocation& allocation) {
  std::vector<bool> is_unused(allocation.size_bytes() / kernels::kBlockBytes, false);
  if (!saver.skip.unused.load()) return is_unused;
  const CUdeviceptr begin = allocation.address();
  const CUdeviceptr end = begin + allocation.size_bytes();
  auto range = std::upper_bound(request.unused.begin(), request.unused.end(), begin,
                                [](CUdeviceptr at, const AddressRange& other) { return at < other.end(); });
  for (; range != request.unused.end() && range->address < end; ++range) {
    const size_t to = std::min(range->end(), end) - begin;
    size_t offset = round_up(std::max(range->address, begin) - begin, kernels::kBlockBytes);
    for (; offset + kernels::kBlockBytes <= to; offset += kernels::kBlockBytes) {
      is_unused[offset / kernels::kBlockBytes] = true;
    }
  }
  return is_unused;
}

std::unique_ptr<Exchange> open_exchange(Saver& saver, int device, uint64_t leaving_bytes,
                                        const std::vector<uint64_t>& returning_sizes) {
  uint64_t returning_bytes = 0;
  uint64_t largest = 0;
  for (const uint64_t size_bytes : returning_sizes) {
    returning_bytes += size_bytes;
    largest = std::max(largest, size_bytes);
  }
  const uint64_t difference = saturating_subtract(returning_bytes, leaving_bytes);
  const uint64_t margin = std::min(std::max(kSwapMarginBytes, largest), returning_bytes);
  // The margin is welcome, the difference is needed.
  DeviceCharge charge;
  uint64_t ahead_bytes = difference + margin;
  try {
    charge = saver.device_budget.claim(device, ahead_bytes);
  } catch (const OutOfMemory&) {
    ahead_bytes = difference;
    charge = saver.device_budget.claim(device, ahead_bytes);
  }
  auto exchange = std::make_unique<Exchange>(device, leaving_bytes, leaving_bytes + ahead_bytes);
  for (const uint64_t size_bytes : returning_sizes) exchange->announce(size_bytes);
  const ContextScope scope(device);
  try {
    exchange->create_ahead(returning_sizes, difference, std::move(charge));
  } catch (const DriverError& error) {
    rethrow_shortage(error, saver.device_budget, device, difference, "swap");
  }
  return exchange;
}

}  // namespace ebbtide
