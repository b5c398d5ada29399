#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/move/move.h"
#include "core/resume/arrivals.h"

// An operation in two phases, made of moves: a pause is one, a swap is a pause and a resume. claim() selects, checks
// and takes all resources in one step, and can be abandoned without a trace; it separates shared handles first.
// commit() moves the bytes. Invariant 3: if it fails before the first byte is given up, everything stays as it was;
// after that every chunk is whole somewhere, and the same operation, claimed again, finishes it.
namespace ebbtide {

class Operation {
 public:
  static std::unique_ptr<Operation> claim(Core& core, OperationKind kind, OperationRequest request);
  // The tags whose content claim() would move, in the order of the request. Waits for the tags, and refuses tags and
  // captures, as it does; but takes no memory, so a shortage shows only there. Nothing is held afterwards.
  static std::vector<std::string> preview(Core& core, OperationKind kind, OperationRequest request);
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  ~Operation() { abandon(); }

  Core& core() { return core_; }

  // Moves everything in the calling thread and threads of its own; after launch(), waits until all has landed. Once. A
  // report for each move.
  std::vector<Report> commit();
  void abandon() noexcept { finish(Outcome::kUntouched); }

  // Of a resume: maps everything and queues the copies on the device, before commit(). Null, with nothing done, where a
  // device can't be copied to in the background.
  std::unique_ptr<Arrivals> launch();

 private:
  Operation(Core& core, OperationKind kind, OperationRequest request, CaptureGate::Permit permit);
  void add_moves();
  std::vector<TagClaim> claims() const;
  void hold_tags();
  void note_tag_names();
  void prepare();
  void separate();
  static void run(std::span<const std::unique_ptr<Move>> moves);
  static void run_devices(std::span<const std::unique_ptr<Move>> moves);
  void let_go(Outcome outcome) noexcept;
  void finish(Outcome outcome) noexcept;
  void fail(const char* reason) noexcept;
  void record(const char* suffix, const char* detail) noexcept;
  double seconds() const;

  Core& core_;
  const OperationKind kind_;
  OperationRequest request_;
  CaptureGate::Permit permit_;
  Selection selection_;
  std::vector<std::unique_ptr<Move>>
      moves_;  // parallel to selection_.groups; a separation is the last, until it is over
  bool must_separate_ = false;
  std::string tag_names_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  uint64_t peer_generation_ = 0;  // of the devices that its mappings are made for
  bool is_finished_ = false;
};

}  // namespace ebbtide
