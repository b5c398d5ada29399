#include "core/operation/backup_view.h"

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "base/scope_exit.h"
#include "core/move/backups.h"

namespace ebbtide {
namespace {

bool is_any_at(Place place, const Allocation& allocation, size_t begin, size_t end) {
  return std::any_of(allocation.chunks.begin(), allocation.chunks.end(), [&](const Chunk& chunk) {
    const bool is_inside = chunk.offset < end && begin < chunk.offset + chunk.size_bytes;
    return is_inside && chunk.place.load() == place;
  });
}

bool is_stored(const Allocation& allocation, size_t begin, size_t end) {
  const auto is_any = [&](Place place) { return is_any_at(place, allocation, begin, end); };
  // What lies on the host stayed there, for the device to read: there is no one range of bytes that holds both.
  if (is_any(Place::kStored) && is_any(Place::kHost))
    throw StateError(
        "a part of this tensor has spilled to host memory and is not in the backup: promote the tag before the pause");
  return !is_any(Place::kDevice) && !is_any(Place::kHost) && !is_any(Place::kDropped);
}

// Of what is on the device: the backup has all of it as it was when it left last.
bool is_retained(const Allocation& allocation, const BackupRecord& stored, size_t begin, size_t end) {
  const auto is_any = [&](Place place) { return is_any_at(place, allocation, begin, end); };
  if (is_any(Place::kStored) || is_any(Place::kHost) || is_any(Place::kDropped)) return false;
  for (size_t block = begin / kernels::kBlockBytes; block * kernels::kBlockBytes < end; ++block) {
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
  HostCharge charge = core.budgets.host.charge(missing_bytes, "showing blocks that were kept as one value",
                                               &BackupHolders(core).of(tag));
  std::vector<std::byte> bytes(kernels::kBlockBytes);
  for (size_t block = first; block < end; ++block) {
    StoredBlock& kept = stored.blocks[block];
    // Whoever looks at it may write, by ways that nobody sees. So it holds what it holds from now on: the next pause
    // copies it, and a resume too.
    kept.has_digest = false;
    if (!kept.is_constant) continue;
    kernels::fill_block(bytes.data(), kept.value);
    stored.backup->write(block * kernels::kBlockBytes, bytes.data(), bytes.size());
    if (!kept.is_touched && stored.kind != BackupKind::kDisk) {
      HostCharge shown = charge.split_promised(kernels::kBlockBytes);
      shown.touch(kernels::kBlockBytes);
      stored.charge.merge(std::move(shown));
    }
    kept.is_touched = true;
    kept.stand_for_bytes();
  }
}

}  // namespace

std::optional<BackupView> view_backup(Core& core, const AddressRange& range, ViewKind kind) {
  const auto allocation = core.registry.find(range.address);
  if (allocation == nullptr) throw InvalidArgument("this address is in no allocation of ebbtide");
  const size_t begin = range.address - allocation->address();
  if (range.size_bytes > allocation->size_bytes() - begin)
    throw InvalidArgument("the range reaches beyond its allocation");
  TagClaim claim{.tags = {.names = {allocation->tag->name}, .addresses = {allocation->address()}, .only = nullptr},
                 .concerns = [kind](const Allocation& each) { return kind == ViewKind::kWindow || each.is_away(); },
                 .moves_memory = false};
  const uint64_t peer_generation = core.peers.generation();
  Selection selection = core.registry.claim({std::move(claim)});
  const ScopeExit release([&]() noexcept {
    core.deferred_frees.destroy_all(core.registry.release(selection, Outcome::kUntouched));
    core.peers.catch_up_after_hold(peer_generation);
  });
  if (selection.groups.front().allocations.empty()) return std::nullopt;
  const size_t end = begin + std::max<size_t>(range.size_bytes, 1);
  const auto stored = core.registry.backup_of(*allocation);
  if (stored == nullptr) return std::nullopt;
  const bool is_shown = is_stored(*allocation, begin, end) ||
                        (kind == ViewKind::kWindow && is_retained(*allocation, *stored, begin, end));
  if (!is_shown) return std::nullopt;
  std::byte* const bytes = stored->backup->view();
  if (bytes == nullptr) return std::nullopt;
  const size_t first = begin / kernels::kBlockBytes;
  const size_t last = (end + kernels::kBlockBytes - 1) / kernels::kBlockBytes;
  show(core, *allocation->tag, *stored, first, last);
  return BackupView(core.deferred_frees, stored, kind, bytes + begin);
}

}  // namespace ebbtide
