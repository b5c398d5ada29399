#include "core/resume.h"

#include <algorithm>

#include "base/error.h"
#include "driver/context.h"

namespace ebbtide {

void ResumePart::prepare(const Allocations& allocations) {
  for (const auto& allocation : allocations) select(allocation);
  for (auto& [device, part] : parts_) {
    create_memory(device, part);
    if (part.jobs.empty()) continue;
    const int threads = choose_copy_threads(part.stored_bytes);
    part.ring.emplace(saver().staging.borrow(device, threads));
    part.copier =
        std::make_unique<Copier>(device, part.ring->staging(), std::min(threads, part.ring->staging().slot_count()));
  }
}

void ResumePart::select(const std::shared_ptr<Allocation>& allocation) {
  // Memory that an earlier failure left behind a chunk that is away still holds old bytes: never map it again (invariant 2). A copy into it may still be queued (invariant 5).
  if (allocation->has_stale_memory()) synchronize_device(allocation->device);
  const auto stored = saver().registry.stored_of(*allocation);
  DevicePart& part = parts_[allocation->device];
  for (Chunk& chunk : allocation->chunks) {
    if (chunk.is_resident()) continue;
    if (chunk.has_stale_memory()) chunk.give_up_stale_memory();
    part.bytes += chunk.size_bytes;
    if (chunk.place.load() == Place::kStored) {
      part.stored_bytes += chunk.size_bytes;
      part.stored.push_back(part.returning.size());
      part.jobs.push_back({allocation->address() + chunk.offset, stored->backup.get(), chunk.offset, chunk.size_bytes});
    }
    part.returning.push_back({allocation, &chunk});
  }
}

void ResumePart::try_create_memory(int device, DevicePart& part) {
  const ContextScope scope(device);
  DeviceCharge charge = saver().device_budget.claim(device, part.bytes);
  for (const Returning& returning : part.returning) {
    returning.chunk->charge = charge.split(returning.chunk->size_bytes);
    returning.chunk->memory = PhysicalMemory::create_on_device(returning.chunk->size_bytes, device);
  }
}

void ResumePart::create_memory(int device, DevicePart& part) {
  for (bool is_last_try = false;; is_last_try = true) {
    try {
      return try_create_memory(device, part);
    } catch (const OutOfMemory&) {
      give_back_unused(part);
      if (is_last_try || !saver().give_back_caches()) throw;
    } catch (const DriverError& error) {
      give_back_unused(part);
      if (is_last_try || error.code != CUDA_ERROR_OUT_OF_MEMORY || !saver().give_back_caches()) {
        rethrow_shortage(error, saver().device_budget, device, part.bytes, "resume");
      }
    }
  }
}

void ResumePart::run() {
  for (auto& [device, part] : parts_) {
    const ContextScope scope(device);
    for (const Returning& returning : part.returning) {
      const CUdeviceptr address = returning.allocation->address() + returning.chunk->offset;
      returning.chunk->mapping = Mapping::map(address, returning.chunk->memory);
    }
  }
  for (auto& [device, part] : parts_) {
    if (part.jobs.empty()) continue;
    part.copier->run(CopyDirection::kToDevice, part.jobs, [&part, this](size_t job) {
      mark_given_up();
      arrive(part.returning[part.stored[job]], part.jobs[job].size_bytes);
    });
  }
  for (auto& [device, part] : parts_) {
    for (const Returning& returning : part.returning) {
      if (!returning.chunk->is_resident()) arrive(returning, 0);
    }
  }
}

void ResumePart::arrive(const Returning& returning, uint64_t copied_bytes) {
  ReportRow& entry = row(*returning.allocation);
  entry.bytes += returning.chunk->size_bytes;
  entry.copied += copied_bytes;
  returning.chunk->place.store(Place::kDevice, std::memory_order_release);
}

// What was created or mapped and did not become resident goes back: nobody has seen it. Only where the copier could not make sure that nothing is queued into it any more, it stays
// behind the chunk, as stale memory, until a synchronisation succeeds.
void ResumePart::give_back_unused(DevicePart& part) noexcept {
  if (part.copier != nullptr && !part.copier->is_quiet()) return;
  for (const Returning& returning : part.returning) {
    Chunk& chunk = *returning.chunk;
    if (chunk.is_resident()) continue;
    chunk.mapping = Mapping{};
    chunk.memory = PhysicalMemory{};
    chunk.charge.reset();
  }
}

void ResumePart::settle() noexcept {
  for (auto& [device, part] : parts_) {
    give_back_unused(part);
    for (const Returning& returning : part.returning) {
      // The backup has done its duty once everything is back; whoever looks at it keeps it alive.
      if (!returning.allocation->is_away()) saver().registry.set_stored(*returning.allocation, nullptr);
    }
  }
  parts_.clear();
}

}  // namespace ebbtide
