#include "core/resume/arrivals.h"

#include <algorithm>

namespace ebbtide {

void Arrivals::add(const AddressRange& chunk, std::shared_ptr<const Delivery> delivery, size_t count) {
  if (count == 0) return;
  if (deliveries_.empty() || deliveries_.back() != delivery) deliveries_.push_back(std::move(delivery));
  chunks_.push_back({chunk, deliveries_.size() - 1, count});
}

void Arrivals::sort() {
  std::sort(chunks_.begin(), chunks_.end(),
            [](const Chunk& a, const Chunk& b) { return a.range.address < b.range.address; });
}

template <typename Visit>
void Arrivals::visit_chunks(const AddressRange& range, Visit visit) const {
  auto chunk = std::partition_point(chunks_.begin(), chunks_.end(),
                                    [&](const Chunk& each) { return each.range.end() <= range.address; });
  for (; chunk != chunks_.end() && chunk->range.address < range.end(); ++chunk) visit(*chunk);
}

bool Arrivals::have_arrived(const AddressRange& range) const {
  bool are_there = true;
  visit_chunks(range, [&](const Chunk& chunk) {
    are_there = are_there && deliveries_[chunk.delivery]->arrived() >= chunk.count;
  });
  return are_there;
}

// Deliveries keep their order, so the last chunk of each is all there is to wait for.
void Arrivals::stream_wait(CUstream stream, const std::vector<AddressRange>& ranges) const {
  std::vector<size_t> counts(deliveries_.size(), 0);
  const auto want = [&](const Chunk& chunk) { counts[chunk.delivery] = std::max(counts[chunk.delivery], chunk.count); };
  if (ranges.empty()) std::for_each(chunks_.begin(), chunks_.end(), want);
  for (const AddressRange& range : ranges) visit_chunks(range, want);
  for (size_t index = 0; index < counts.size(); ++index) deliveries_[index]->stream_wait(stream, counts[index]);
}

}  // namespace ebbtide
