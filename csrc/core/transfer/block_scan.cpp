#include "core/transfer/block_scan.h"

#include <algorithm>
#include <optional>

#include "driver/context.h"

namespace ebbtide {
namespace {

constexpr size_t kBlocksPerGroup = 512;  // 1 GiB: a quarter of a millisecond at the rate of device memory
constexpr size_t kBytesPerBlock = sizeof(uint64_t) + 2 * sizeof(kernels::BlockReport);
// A CTA reads a block in 45 us on an H200. So many blocks, with a CTA for each section, are two CTAs for each of its
// 132 SMs.
constexpr size_t kFewBlocks = 32;
constexpr size_t kSectionBytesPerBlock = sizeof(kernels::BlockReport) * 2 * kernels::kSections;

// Where the reports of sections lie in a table: behind everything else.
kernels::BlockReport* sections_in(std::byte* table, size_t capacity, size_t number) {
  if (capacity > kFewBlocks) return nullptr;
  auto* const first = reinterpret_cast<kernels::BlockReport*>(table + capacity * kBytesPerBlock);
  return first + number * capacity * kernels::kSections;
}

}  // namespace

std::unique_ptr<BlockScan> BlockScan::create(EnginePool::Loan& loan, size_t block_count, kernels::Digest seed,
                                             size_t later_block_count) {
  if (block_count == 0) return nullptr;
  const DeviceKernels* const kernels = DeviceKernels::of(loan.engine().device());
  if (kernels == nullptr) return nullptr;
  std::byte* const table = loan.try_table(table_bytes(std::max(block_count, later_block_count)));
  if (table == nullptr) return nullptr;  // nothing is known, and everything is copied
  return std::unique_ptr<BlockScan>(new BlockScan(loan.engine(), *kernels, table, block_count, seed));
}

uint64_t BlockScan::table_bytes(size_t block_count) {
  return block_count * kBytesPerBlock + std::min(block_count, kFewBlocks) * kSectionBytesPerBlock;
}

BlockScan::BlockScan(CopyEngine& engine, const DeviceKernels& kernels, std::byte* table, size_t capacity,
                     kernels::Digest seed)
    : engine_(engine),
      kernels_(kernels),
      capacity_(capacity),
      seed_(seed),
      addresses_(reinterpret_cast<uint64_t*>(table)),
      reports_(reinterpret_cast<kernels::BlockReport*>(table + capacity * sizeof(uint64_t))),
      second_reports_(reports_ + capacity),
      sections_(sections_in(table, capacity, 0)),
      second_sections_(sections_in(table, capacity, 1)) {}

BlockScan::~BlockScan() {
  const bool is_over = std::all_of(groups_.begin(), groups_.end(), [](const Group& group) { return group.is_done; });
  if (may_run_in_ != nullptr && !is_over) wait_for(*may_run_in_);
  if (may_look_again_) wait_for(engine_.side_stream());
}

void BlockScan::wait_for(const Stream& stream) noexcept {
  std::optional<ContextScope> scope;
  try {
    scope.emplace(engine_.device());
  } catch (...) {
    // The stream may be waited for all the same.
  }
  engine_.settle(stream);
}

size_t BlockScan::add(CUdeviceptr address, size_t size_bytes) {
  const size_t first = count_;
  for (size_t offset = 0; offset < size_bytes && count_ < capacity_; offset += kernels::kBlockBytes) {
    addresses_[count_++] = address + offset;
  }
  return first;
}

bool BlockScan::is_short() const { return count_ <= kBlocksPerGroup; }

void BlockScan::launch(const Stream& stream) {
  const ContextScope scope(engine_.device());
  may_run_in_ = &stream;
  for (size_t first = 0; first < count_;) {
    const size_t end = std::min(first + kBlocksPerGroup, count_);
    Group& group = groups_.emplace_back(Group{first, end, Event::create()});
    digest(stream, first, end - first, reports_, sections_);
    group.done.record(stream);
    first = end;
  }
}

const kernels::BlockReport& BlockScan::report(size_t number) {
  Group& group = groups_[number / kBlocksPerGroup];
  if (!group.is_done) {
    group.done.synchronize();
    join(group.first, group.end - group.first, reports_, sections_);
    group.is_done = true;
  }
  return reports_[number];
}

const kernels::BlockReport* BlockScan::look_again(size_t first, size_t count) {
  const ContextScope scope(engine_.device());
  may_look_again_ = true;
  digest(engine_.side_stream(), first, count, second_reports_, second_sections_);
  engine_.side_stream().synchronize();
  may_look_again_ = false;
  return second_look(first, count);
}

void BlockScan::queue_second_look(size_t first, size_t count) {
  digest(engine_.stream(), first, count, second_reports_, second_sections_);
}

const kernels::BlockReport* BlockScan::second_look(size_t first, size_t count) {
  join(first, count, second_reports_, second_sections_);
  return second_reports_ + first;
}

void BlockScan::digest(const Stream& stream, size_t first, size_t count, kernels::BlockReport* reports,
                       kernels::BlockReport* sections) const {
  const uint32_t parts = sections != nullptr ? kernels::kSections : 1;
  kernels::BlockReport* const all = sections != nullptr ? sections : reports;
  kernels_.digest(stream.get(), addresses_ + first, all + first * parts, seed_, static_cast<uint32_t>(count), parts);
}

void BlockScan::join(size_t first, size_t count, kernels::BlockReport* reports,
                     const kernels::BlockReport* sections) const {
  for (size_t block = first; sections != nullptr && block < first + count; ++block)
    reports[block] = kernels::join_sections(sections + block * kernels::kSections, seed_);
}

}  // namespace ebbtide
