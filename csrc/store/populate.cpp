#include "store/populate.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

#include "base/bytes.h"
#include "store/parallel.h"

namespace ebbtide {
namespace {

// Small enough that the threads end together, large enough that a piece costs little compared to its pages.
constexpr size_t kPieceBytes = 8 * kMiB;

struct Piece {
  const PopulateRange* populate;
  size_t offset;
  size_t size_bytes;
};

}  // namespace

void populate_ranges(const std::vector<std::pair<PopulateRange, size_t>>& ranges, int threads) {
  std::vector<Piece> pieces;
  for (const auto& [populate_range, size_bytes] : ranges) {
    for (size_t offset = 0; offset < size_bytes; offset += kPieceBytes)
      pieces.push_back({&populate_range, offset, std::min(kPieceBytes, size_bytes - offset)});
  }
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&](int) noexcept {
    try {
      for (size_t index = next++; index < pieces.size(); index = next++)
        (*pieces[index].populate)(pieces[index].offset, pieces[index].size_bytes);
    } catch (...) {
      next.store(pieces.size());
      const std::lock_guard lock(mutex);
      if (failure == nullptr) failure = std::current_exception();
    }
  };
  run_parallel(static_cast<int>(std::min(static_cast<size_t>(std::max(threads, 1)), pieces.size())), work);
  if (failure != nullptr) std::rethrow_exception(failure);
}

void populate_all(const std::vector<std::pair<Backup*, size_t>>& backups, int threads) {
  std::vector<std::pair<PopulateRange, size_t>> ranges;
  for (const auto& [backup, size_bytes] : backups)
    ranges.emplace_back(std::bind_front(&Backup::populate, backup), size_bytes);
  populate_ranges(ranges, threads);
  for (const auto& [backup, size_bytes] : backups) backup->seal();
}

}  // namespace ebbtide
