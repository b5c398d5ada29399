#include "core/operation/backup_view.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/scope_exit.h"
#include "core/move/backups.h"
#include "store/aligned_bytes.h"

namespace ebbtide {
namespace {

// By place: whether a chunk in the range lies there.
std::array<bool, 4> places_of(const Allocation& allocation, size_t begin, size_t end) {
  std::array<bool, 4> places{};
  for (const Chunk& chunk : allocation.chunks) {
    if (chunk.offset < end && begin < chunk.offset + chunk.size_bytes)
      places[static_cast<size_t>(chunk.place.load())] = true;
  }
  return places;
}

// All of it; or, for a window, on the device, and the backup has all of it as it was when it left last.
bool is_shown(const Allocation& allocation, const BackupRecord& stored, size_t begin, size_t end, ViewKind kind) {
  const auto [is_on_device, is_on_host, is_stored, is_dropped] = places_of(allocation, begin, end);
  // A chunk on the host stayed there, for the device to read: there is no one range of bytes that holds both.
  if (is_stored && is_on_host)
    throw StateError(
        "a part of this tensor has spilled to host memory and is not in the backup: promote the tag before the pause");
  if (is_on_host || is_dropped || (is_on_device && (is_stored || kind != ViewKind::kWindow))) return false;
  for (size_t block = begin / kernels::kBlockBytes; is_on_device && block * kernels::kBlockBytes < end; ++block) {
    if (!stored.blocks[block].has_content) return false;
  }
  return true;
}

// Blocks [first, end) get their bytes where they are one value, and nothing is known of them any more.
void show(Core& core, const Tag& tag, BackupRecord& stored, size_t first, size_t end) {
  uint64_t missing_bytes = 0;
  for (size_t block = first; block < end; ++block) {
    const bool is_missing = stored.blocks[block].is_constant && !stored.blocks[block].is_touched;
    missing_bytes += is_missing && stored.kind != BackupKind::kDisk ? kernels::kBlockBytes : 0;
  }
  HostCharge charge =
      core.budgets.host.charge(missing_bytes, "showing blocks that were kept as one value", &backup_holder(core, tag));
  const AlignedBytes bytes(kernels::kBlockBytes);
  for (size_t block = first; block < end; ++block) {
    StoredBlock& kept = stored.blocks[block];
    // The holder of the view may write into it unseen. So its digest and value say nothing any more: the next pause
    // copies the block, and a resume too.
    kept.has_digest = false;
    if (!kept.is_constant) continue;
    kernels::fill_block(bytes.get(), kept.value);
    stored.backup->write(block * kernels::kBlockBytes, bytes.get(), kernels::kBlockBytes);
    touch_blocks(stored, charge, block, 1);
    kept.mark_stored();
  }
}

}  // namespace

std::optional<BackupView> view_backup(Core& core, const AddressRange& range, ViewKind kind) {
  auto found = core.registry.find(range.address);
  if (found == nullptr) throw InvalidArgument("this address is in no allocation of ebbtide");
  const CUdeviceptr address = found->address();
  const size_t begin = range.address - address;
  if (range.size_bytes > found->size_bytes() - begin) throw InvalidArgument("the range reaches beyond its allocation");
  TagClaim claim{.tags = {.names = {found->tag->name}, .addresses = {address}, .only = nullptr},
                 .concerns =
                     [kind, sequence = found->sequence](const Allocation& each) {
                       return each.sequence == sequence && (kind == ViewKind::kWindow || each.is_away());
                     },
                 .moves_memory = false};
  // Freed while the claim waits, it would end here, beside a capture. Another one may lie there then.
  found.reset();
  const uint64_t peer_generation = core.peers.generation();
  Selection selection = core.registry.claim({std::move(claim)});
  const ScopeExit release([&]() noexcept {
    core.deferred_frees.destroy_all(core.registry.release(selection, Outcome::kUntouched));
    core.peers.catch_up_after_hold(peer_generation);
  });
  if (selection.groups.front().allocations.empty()) return std::nullopt;
  const auto& allocation = selection.groups.front().allocations.front();
  const size_t end = begin + std::max<size_t>(range.size_bytes, 1);
  const auto stored = allocation->stored;
  if (stored == nullptr) return std::nullopt;
  if (!is_shown(*allocation, *stored, begin, end, kind)) return std::nullopt;
  std::byte* const bytes = stored->backup->view();
  if (bytes == nullptr) return std::nullopt;
  const size_t first = begin / kernels::kBlockBytes;
  const size_t last = (end + kernels::kBlockBytes - 1) / kernels::kBlockBytes;
  show(core, *allocation->tag, *stored, first, last);
  return BackupView(core.deferred_frees, stored, kind, bytes + begin);
}

}  // namespace ebbtide
