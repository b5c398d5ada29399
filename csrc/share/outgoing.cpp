#include "share/outgoing.h"

#include <algorithm>

#include "core/operation/operation.h"

namespace ebbtide {

Descriptor Outgoing::try_export(int device, const PhysicalMemory& memory) noexcept {
  try {
    if (memory.kind().is_exportable && receiver_.wants(device, memory.size_bytes())) return memory.export_file();
  } catch (...) {
    // It is released, as in any other pause.
  }
  return {};
}

// Released here before it is given: what the receiver gives back in its turn is free then.
void Outgoing::release(int device, Backing& backing) {
  if (!backing.has_memory() || backing.memory.is_on_host()) return Pause::release(device, backing);
  const uint64_t size_bytes = backing.memory.size_bytes();
  backing.mapping.unmap();
  Descriptor file = try_export(device, backing.memory);
  Pause::release(device, backing);
  if (file && receiver_.give(device, size_bytes, file.file())) return;
  file = {};
  receiver_.note_released(device, size_bytes);
}

std::vector<Leaving> find_leaving(Core& core, const TagRequest& tags) {
  std::vector<Leaving> found;
  core.registry.visit_tags([&](const Tag& tag) {
    const auto& names = tags.names;
    if (!names.empty() && std::find(names.begin(), names.end(), tag.name) == names.end()) return;
    for (const auto& [sequence, allocation] : tag.allocations) {
      if (!allocation->wants_pause()) continue;
      for (const Chunk& chunk : allocation->chunks) {
        if (chunk.is_on_device())
          found.push_back({allocation->device, {chunk.size_bytes, allocation->policy.is_exportable}});
      }
    }
  });
  return found;
}

Report hand_over(Core& core, OperationRequest request, const Receiver& receiver) {
  request.make_move = [&](Core& made_in, const OperationRequest& read) {
    return std::make_unique<Outgoing>(made_in, read, receiver);
  };
  return std::move(Operation::claim(core, OperationKind::kPause, std::move(request))->commit().front());
}

}  // namespace ebbtide
