#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "core/transfer/engine_pool.h"
#include "store/ring_copy.h"

namespace ebbtide {

// Copies items while the caller makes the next ones ready. `land` is called for each, in the calling thread, once its
// bytes have landed.
template <typename Item>
class CopyRun {
 public:
  // loan outlives it, and may be null if no job has ranges. must_have_threads: as of RingCopy.
  CopyRun(EnginePool::Loan* loan, CopyDirection direction, std::function<void(Item&)> land,
          bool must_have_threads = false)
      : loan_(loan), direction_(direction), land_(std::move(land)), must_have_threads_(must_have_threads) {}

  // The item outlives the run. A job without ranges lands at once.
  void submit(Item& item, const CopyJob& job) {
    if (job.ranges.empty()) {
      land_(item);
    } else {
      // Its threads are not started where nothing must be copied.
      if (!copy_) copy_.emplace(loan_->engine(), direction_, loan_->cut(), must_have_threads_);
      submitted_.push_back(&item);
      copy_->submit(job);
    }
    while (const auto landed = copy_ ? copy_->poll_landed() : std::nullopt) land_(*submitted_[*landed]);
  }
  // After the last item. Throws as RingCopy::finish_next() does.
  void finish() {
    while (const auto landed = copy_ ? copy_->finish_next() : std::nullopt) land_(*submitted_[*landed]);
  }

 private:
  EnginePool::Loan* const loan_;
  const CopyDirection direction_;
  const std::function<void(Item&)> land_;
  const bool must_have_threads_;
  std::optional<RingCopy> copy_;
  std::vector<Item*> submitted_;
};

}  // namespace ebbtide
