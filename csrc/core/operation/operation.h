#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/memory/exchange.h"
#include "core/state/saver.h"

// An operation in two phases. claim() selects, checks and takes whatever will be needed; it can be abandoned without a trace. commit() moves the bytes.
//
// It is made of parts: a pause has one PausePart, a resume one ResumePart, a swap one of each; all parts are claimed in one step, so that two operations never wait for each other.
//
// Invariant 3: commit() that fails before the first byte is given up leaves everything as it was; after that every chunk is whole somewhere, and the same operation, claimed
// again, finishes it.
namespace ebbtide {

struct ReportRow {
  uint64_t bytes = 0;   // device bytes freed or claimed
  uint64_t copied = 0;  // bytes that crossed the bus
  // Bytes with a backup that needed no copy, by reason.
  uint64_t clean = 0;     // the store holds them already
  uint64_t unused = 0;    // nobody uses them
  uint64_t constant = 0;  // one repeated value
  uint64_t skipped() const { return clean + unused + constant; }
  bool is_empty() const { return bytes + copied + skipped() == 0; }
  ReportRow& operator+=(const ReportRow& other);
};
using ReportRows = std::map<std::pair<std::string, int>, ReportRow>;  // by tag and device

struct Report {
  OperationKind kind = OperationKind::kPause;
  double seconds = 0;
  ReportRows rows;
  // What was on devices after the operation.
  std::shared_ptr<const std::vector<HeldBytes>> held = std::make_shared<const std::vector<HeldBytes>>();
  ReportRows left() const;  // the same, as rows
  ReportRow totals() const;
};

using Allocations = std::vector<std::shared_ptr<Allocation>>;
using Exchanges = std::map<int, std::unique_ptr<Exchange>>;  // by device

// What one kind of move does with the allocations that the operation holds for it.
class OperationPart {
 public:
  explicit OperationPart(Saver& saver) : saver_(saver) {}
  OperationPart(const OperationPart&) = delete;
  OperationPart& operator=(const OperationPart&) = delete;
  virtual ~OperationPart() = default;

  // Takes what the moving will need. Throws with nothing changed that settle() does not undo.
  virtual void prepare(const Allocations& allocations) = 0;
  // Whether kernels may still use what it moves: then the devices are synchronised before anything moves.
  virtual bool takes_memory_away() const = 0;
  // The devices that it has something to do on.
  virtual std::vector<int> devices() const = 0;
  // Moves what is on one device, whose context is current. Several devices at once, each in a thread of its own.
  virtual void run_device(int device) = 0;
  // After all devices, where none failed.
  virtual void run_last() {}
  // After that, also after a failed or omitted run: puts back what was taken and not used, and drops every reference to allocations.
  virtual void settle() noexcept = 0;

  const ReportRows& rows() const { return rows_; }
  bool has_given_up_any() const { return has_given_up_any_.load(); }

 protected:
  Saver& saver() { return saver_; }
  // In prepare() for every allocation, so that the threads of run_device() find their rows without changing the table.
  void add_row(const Allocation& allocation) { rows_[{allocation.tag->name, allocation.device}]; }
  ReportRow& row(const Allocation& allocation) { return rows_.at({allocation.tag->name, allocation.device}); }
  // From now on a failure leaves the operation midway.
  void mark_given_up() { has_given_up_any_.store(true); }

 private:
  Saver& saver_;
  ReportRows rows_;
  std::atomic<bool> has_given_up_any_{false};
};

class Arrivals;

class Operation {
 public:
  static std::unique_ptr<Operation> claim(Saver& saver, OperationKind kind, OperationRequest request);
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  ~Operation() { abandon(); }

  Saver& saver() { return saver_; }

  // Once. A report for each part.
  std::vector<Report> commit();
  void abandon() noexcept { finish(Outcome::kUntouched); }

  // Of a resume, before commit(), which then only waits: maps everything and queues the copies. Null where a device can't be copied to in the background: commit() does it all.
  std::unique_ptr<Arrivals> map_ahead();

 private:
  Operation(Saver& saver, OperationKind kind, OperationRequest request, CaptureGate::Permit permit);
  std::vector<ClaimPart> add_parts();
  void note_tag_names();
  void prepare();
  void open_exchanges();
  void run();
  void run_devices();
  void note_moved();
  void forget_unmoved() noexcept;
  void finish(Outcome outcome) noexcept;
  void fail(Outcome outcome, const char* reason) noexcept;
  void record(const char* suffix, const char* detail, double seconds) noexcept;
  Report report_of(const OperationPart& part, bool is_leaving, double seconds);
  double seconds() const;
  bool has_given_up_any() const;

  Saver& saver_;
  const OperationKind kind_;
  OperationRequest request_;
  CaptureGate::Permit permit_;
  Exchanges exchanges_;  // of a swap
  Selection selection_;
  std::vector<std::unique_ptr<OperationPart>> parts_;  // parallel to selection_.parts
  std::string tag_names_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  uint64_t peer_generation_ = 0;  // as of when what it maps is mapped for
  bool is_finished_ = false;
};

// Blocks that lie whole in a range of which the request says that nobody uses it.
std::vector<bool> unused_blocks(const Saver& saver, const OperationRequest& request, const Allocation& allocation);

// Of a swap on one device: memory for what comes back beyond what leaves, created now, and a margin so that both directions of the bus begin at once. Throws OutOfMemory.
std::unique_ptr<Exchange> open_exchange(Saver& saver, int device, uint64_t leaving_bytes,
                                        const std::vector<uint64_t>& returning_sizes);

}  // namespace ebbtide
