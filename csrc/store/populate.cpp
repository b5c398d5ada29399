#include "store/populate.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "base/bytes.h"
#include "store/parallel.h"

namespace ebbtide {
namespace {

// Small enough that the threads end together, large enough that a range costs little compared to its pages.
constexpr size_t kRangeBytes = 8 * kMiB;

using Populate = std::function<void(size_t offset, size_t size_bytes)>;

struct Range {
  const Populate* populate;
  size_t offset;
  size_t size_bytes;
};

void cut_into_ranges(const Populate& populate, size_t size_bytes, std::vector<Range>& ranges) {
  for (size_t offset = 0; offset < size_bytes; offset += kRangeBytes) {
    ranges.push_back({&populate, offset, std::min(kRangeBytes, size_bytes - offset)});
  }
}

// The state that the threads share: the next range, and the first failure.
class Work {
 public:
  explicit Work(std::vector<Range> ranges) : ranges_(std::move(ranges)) {}

  void run() noexcept {
    try {
      while (!has_failed_.load()) {
        const size_t index = next_.fetch_add(1);
        if (index >= ranges_.size()) return;
        (*ranges_[index].populate)(ranges_[index].offset, ranges_[index].size_bytes);
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (failure_ == nullptr) failure_ = std::current_exception();
      has_failed_.store(true);
    }
  }
  size_t range_count() const { return ranges_.size(); }
  void rethrow_failure() const {
    if (failure_ != nullptr) std::rethrow_exception(failure_);
  }

 private:
  const std::vector<Range> ranges_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> has_failed_{false};
  std::mutex mutex_;
  std::exception_ptr failure_;
};

void run_by_threads(std::vector<Range> ranges, int threads) {
  Work work(std::move(ranges));
  const size_t useful = std::min(static_cast<size_t>(std::max(threads, 1)), work.range_count());
  run_parallel(static_cast<int>(useful), [&work](int) noexcept { work.run(); });
  work.rethrow_failure();
}

}  // namespace

void populate(const AnonymousMemory& memory, int threads) {
  const Populate populate_range = [&](size_t offset, size_t size_bytes) { memory.populate(offset, size_bytes); };
  std::vector<Range> ranges;
  cut_into_ranges(populate_range, memory.size_bytes(), ranges);
  run_by_threads(std::move(ranges), threads);
}

void populate_all(std::span<Backup* const> backups, std::span<const size_t> sizes, int threads) {
  std::vector<Populate> populates;
  for (Backup* backup : backups) {
    populates.emplace_back([backup](size_t offset, size_t size_bytes) { backup->populate(offset, size_bytes); });
  }
  std::vector<Range> ranges;
  for (size_t index = 0; index < backups.size(); ++index) cut_into_ranges(populates[index], sizes[index], ranges);
  run_by_threads(std::move(ranges), threads);
  for (Backup* backup : backups) backup->seal();
}

}  // namespace ebbtide
