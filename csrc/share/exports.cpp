#include "share/exports.h"

#include "base/error.h"
#include "core/move/relocations.h"
#include "core/operation/operation.h"
#include "share/stay.h"

namespace ebbtide {
namespace {

// Gives the allocation handles of its own.
void separate(Core& core, const std::string& tag, CUdeviceptr address) {
  OperationRequest request;
  request.tags.names = {tag};
  request.tags.addresses = {address};
  Operation::claim(core, OperationKind::kSeparate, std::move(request))->commit();
}

}  // namespace

std::vector<ExportedPiece> export_memory(Core& core, CUdeviceptr address) {
  const Stay stay(core, address, false);
  const Allocation& allocation = *stay.allocation();
  if (!allocation.policy.is_exportable)
    throw StateError("tag '" + allocation.tag->name +
                     "' was allocated for this process alone: memory that others may use is allocated as exportable");
  std::vector<ExportedPiece> pieces;
  for (const Chunk& chunk : allocation.chunks)
    pieces.push_back({chunk.size_bytes, chunk.backing->memory.export_file()});
  core.registry.add_to(*stay.allocation(), &Allocation::lent_count, 1);
  return pieces;
}

void end_export(Core& core, CUdeviceptr address) {
  if (const auto found = core.registry.find(address)) core.registry.add_to(*found, &Allocation::lent_count, -1);
}

void refuse_moves(Core& core, CUdeviceptr address, bool refuses) {
  if (const auto found = core.registry.find(address))
    core.registry.add_to(*found, &Allocation::refusal_count, refuses ? 1 : -1);
}

void keep(Core& core, CUdeviceptr address) {
  std::string tag;
  for (int look = 0; look < 2; ++look) {
    {
      const Stay stay(core, address, true);
      address = stay.allocation()->address();
      tag = stay.allocation()->tag->name;
      if (!is_any_shared({stay.allocation()}))
        return core.registry.add_to(*stay.allocation(), &Allocation::keep_count, 1);
    }
    if (look == 0) separate(core, tag, address);
  }
  throw StateError("tag '" + tag +
                   "' has no room on the device to give this memory a handle of its own, apart from its neighbours: "
                   "make room, or resume with EBBTIDE_SHARED_HANDLE at 0");
}

void end_keep(Core& core, CUdeviceptr address) {
  if (const auto found = core.registry.find(address)) core.registry.add_to(*found, &Allocation::keep_count, -1);
}

}  // namespace ebbtide
