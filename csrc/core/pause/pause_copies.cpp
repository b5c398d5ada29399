// How the content leaves: a handle goes when the last byte behind it has landed.
#include "core/pause/pause.h"
#include "core/transfer/copy_run.h"

namespace ebbtide {

void Pause::run_device(int device) {
  DeviceWork& work = work_.at(device);
  if (!work.handles.empty()) move_out(work);
  if (hands_over_memory()) drop(device);
}

void Pause::move_out(DeviceWork& work) {
  work.expects_change = expects_change(work);
  if (work.expects_change)
    work.scan->launch_before_copies();
  else if (work.scan != nullptr)
    work.scan->launch();
  CopyRun<LeavingChunk> run(work.engine.get(), CopyDirection::kToStore,
                            [&](const LeavingChunk& leaving) { land(work, leaving); });
  for (LeavingHandle& handle : work.handles) {
    for (LeavingChunk& leaving : handle.chunks) {
      decide(work, leaving);
      run.submit(leaving, job_of(work, leaving));
    }
  }
  run.finish();
}

// Behind the last job nothing else wants the bus, so its second look follows in the stream, without a wait between.
CopyJob Pause::job_of(DeviceWork& work, LeavingChunk& leaving) {
  CopyJob job = {.device_address = leaving.address(),
                 .backup = leaving.paused->stored->backup.get(),
                 .offset = leaving.chunk->offset,
                 .ranges = leaving.ranges};
  leaving.is_followed = &leaving == &work.handles.back().chunks.back() && keeps_digests(work, leaving);
  if (leaving.is_followed)
    job.then = [&] { work.scan->queue_second_look(leaving.first_scanned, leaving.chunk->block_count()); };
  return job;
}

void Pause::land(DeviceWork& work, const LeavingChunk& leaving) {
  note_digests(work, leaving);
  LeavingHandle& handle = handle_of(leaving);
  if (--handle.missing == 0) give_up(handle);
}

void Pause::give_up(const LeavingHandle& handle) {
  // Before the device gives the bytes up, so that they are never nowhere.
  for (const LeavingChunk& leaving : handle.chunks) attach_backup(core(), *leaving.paused);
  handle.chunks.front().chunk->backing->mapping.unmap();
  note_released();
  for (const LeavingChunk& leaving : handle.chunks)
    leaving.chunk->place.store(Place::kStored, std::memory_order_release);
  for (const LeavingChunk& leaving : handle.chunks) {
    PausedAllocation& paused = *leaving.paused;
    const Chunk& chunk = *leaving.chunk;
    for (size_t block = chunk.first_block(); block < chunk.end_block(); ++block)
      paused.stored->blocks[block].has_content = true;
    for (const CopyRange& range : leaving.ranges) {
      row(*leaving.allocation).copied += range.size_bytes;
      touch_blocks(*paused.stored, paused.charge, chunk.first_block() + range.offset / kernels::kBlockBytes,
                   range.size_bytes / kernels::kBlockBytes);
    }
  }
  release_memory(handle);
}

}  // namespace ebbtide
