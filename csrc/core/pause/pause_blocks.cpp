// The decision of a pause about each block: it is copied, or recorded as a value.
#include <algorithm>

#include "core/pause/pause.h"

namespace ebbtide {
namespace {

// Of all that is in use, which is not nothing: so something is copied behind the scan, and the chunk stays until then.
bool changed_last_time(const LeavingChunk& leaving) {
  const PausedAllocation& paused = *leaving.paused;
  const BackupRecord& record = *paused.stored;
  if (record.backup->direct() == nullptr || record.has_windows() || paused.earlier == nullptr) return false;
  bool is_used = false;
  for (size_t block = leaving.chunk->first_block(); block < leaving.chunk->end_block(); ++block) {
    if (paused.is_unused[block]) continue;
    is_used = true;
    if (!record.blocks[block].has_digest || (*paused.earlier)[block] != Verdict::kChanged) return false;
  }
  return is_used;
}

}  // namespace

// Whether the copies are queued behind the scan without a look at it: a block that changed before each of the last two
// pauses has probably changed again. If not, that costs one copy, and the next pause looks first.
bool Pause::expects_change(const DeviceWork& work) {
  if (work.scan == nullptr || !work.scan->is_short() || !core().rules.skip.clean.load()) return false;
  return std::all_of(work.handles.begin(), work.handles.end(), [](const LeavingHandle& handle) {
    return std::all_of(handle.chunks.begin(), handle.chunks.end(), changed_last_time);
  });
}

void Pause::decide(DeviceWork& work, LeavingChunk& leaving) {
  for (size_t index = 0; index < leaving.chunk->block_count(); ++index) {
    // Where change is expected, the reports are looked at when the copy has landed.
    const bool is_report_awaited = work.scan != nullptr && !work.expects_change;
    const kernels::BlockReport* const report =
        is_report_awaited ? &work.scan->report(leaving.first_scanned + index) : nullptr;
    const size_t block = leaving.chunk->first_block() + index;
    const Verdict verdict = judge(*leaving.paused, block, report);
    (*leaving.paused->verdicts)[block] = verdict;
    ReportRow& entry = row(*leaving.allocation);
    switch (verdict) {
      case Verdict::kClean: entry.clean += kernels::kBlockBytes; break;
      case Verdict::kUnused: entry.unused += kernels::kBlockBytes; break;
      case Verdict::kConstant: entry.constant += kernels::kBlockBytes; break;
      default: add_block(leaving.ranges, index * kernels::kBlockBytes); break;
    }
  }
}

// Records the block's content while it is away: bytes or a value. Until its chunk leaves, the block on the device is
// itself.
Verdict Pause::judge(PausedAllocation& paused, size_t block, const kernels::BlockReport* report) {
  const SkipRules& skip = core().rules.skip;
  StoredBlock& stored = paused.stored->blocks[block];
  if (paused.is_unused[block]) {
    stored.mark_unused(core().rules.dropped_value());
    stored.has_content = false;
    return Verdict::kUnused;
  }
  const bool is_in_window = stored.is_touched && paused.stored->has_windows();
  if (report != nullptr && report->is_constant != 0 && skip.constant.load() && !is_in_window) {
    stored.mark_constant(report->value);
    stored.has_content = false;
    return Verdict::kConstant;
  }
  const bool was_stored = stored.has_content && !stored.is_unused;
  const bool was_constant = was_stored && stored.is_constant;
  stored.mark_stored();
  const bool is_known = report != nullptr && skip.clean.load() && stored.has_digest;
  if (is_known && stored.digest == report->digest) return Verdict::kClean;
  stored.has_digest = stored.has_content = false;  // before its bytes in the store change
  if (is_known) return Verdict::kChanged;
  if (was_constant && report != nullptr && report->is_constant == 0) return Verdict::kFilled;
  const bool is_uncompared = report == nullptr || !skip.clean.load();
  return was_stored && is_uncompared ? Verdict::kUncompared : Verdict::kCopied;
}

bool Pause::keeps_digests(const DeviceWork& work, const LeavingChunk& leaving) {
  const BackupRecord& record = *leaving.paused->stored;
  // Bytes in a window may be written, by ways that ebbtide does not see.
  const bool may_be_kept =
      leaving.allocation->policy.retain || record.kind == BackupKind::kPinned || core().rules.keeps_ahead.load();
  return may_be_kept && !record.has_windows() && work.scan != nullptr && core().rules.skip.clean.load();
}

// The store holds the chunk's bytes as of its digest, if the chunk still has that digest now that all is copied.
void Pause::note_digests(DeviceWork& work, const LeavingChunk& leaving) {
  if (leaving.ranges.empty() || !keeps_digests(work, leaving)) return;
  const size_t count = leaving.chunk->block_count();
  const kernels::BlockReport* const again = leaving.is_followed ? work.scan->second_look(leaving.first_scanned, count)
                                                                : work.scan->look_again(leaving.first_scanned, count);
  for (const CopyRange& range : leaving.ranges) {
    const size_t first = range.offset / kernels::kBlockBytes;
    for (size_t index = first; index < first + range.size_bytes / kernels::kBlockBytes; ++index) {
      const size_t block = leaving.chunk->first_block() + index;
      StoredBlock& stored = leaving.paused->stored->blocks[block];
      const kernels::BlockReport& before = work.scan->report(leaving.first_scanned + index);
      // The digest is still that of the last pause.
      if (work.expects_change && stored.digest != before.digest && before.is_constant == 0)
        (*leaving.paused->verdicts)[block] = Verdict::kChanged;
      stored.digest = again[index].digest;
      stored.has_digest = stored.digest == before.digest;
    }
  }
}

}  // namespace ebbtide
