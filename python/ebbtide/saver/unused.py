"""Which memory of some tags nobody uses: free blocks inside torch's segments. No pause or resume need copy them.

What holds here:
- The ranges are true as of a moment: the number of the newest lease is read first, then it is made sure that none of
  the tags is leased, then torch is asked. Only who holds a lease takes free blocks, so a lease that is newer makes the
  core forget the ranges, and one that was older is over.
- A graph's replay uses what torch calls free: pools that a capture may have taken memory from are never asked.
- It saves work and nothing else: whatever goes wrong here means that more is copied.
"""

import logging
from collections.abc import Callable, Sequence

from ebbtide import _core
from ebbtide.saver import detour, leases, pools, program
from ebbtide.saver.known_tags import find_tags
from ebbtide.saver.names import AS_ALLOCATED_CODE, NO_BACKUP_CODE
from ebbtide.saver.snapshots import Range, Segment, are_apart, free_ranges

FEW_POOLS = 8  # what torch is asked about one by one: its account of all pools is as long as all that it holds

_logger = logging.getLogger(__name__)


def find(names: list[str], backup: int) -> tuple[list[Range], int]:
    """The unused ranges of these tags (none: of every tag), sorted and apart, and the lease that they are true as of.

    Args:
        backup: the code of the pause; where nothing is kept, nothing needs to be found.
    """

    def is_wanted(info: "_core.TagInfo", own_backup: int) -> bool:
        is_kept = backup != NO_BACKUP_CODE and (backup != AS_ALLOCATED_CODE or own_backup != NO_BACKUP_CODE)
        return is_kept and info.resident_bytes > 0

    return _find(names, is_wanted, is_leaving=True)


def find_away(names: list[str]) -> tuple[list[Range], int]:
    """The same, of what is away and has a backup."""
    return _find(names, lambda info, _: info.stored_bytes > 0)


def find_for_swap(leaving: list[str], returning: list[str], backup: int) -> tuple[list[Range], int]:
    """The same, of both sides."""
    (ranges, as_of), (others, others_as_of) = find(leaving, backup), find_away(returning)
    return sorted(ranges + others), min(as_of, others_as_of) if ranges and others else max(as_of, others_as_of)


def _find(
    names: list[str], is_wanted: Callable[["_core.TagInfo", int], bool], is_leaving: bool = False
) -> tuple[list[Range], int]:
    backend, own = pools.existing_backend(), program.own()
    if (backend is None and own is None) or not _core.get_option("skip_unused"):
        return [], 0
    as_of = _core.last_lease()
    chosen = find_tags(names)
    if any(info.lease_count for info in chosen.values()):
        return [], 0
    looked_at = [
        (key, lent)
        for key, lent in (*leases.shelf.idle(chosen), *leases.shelf.dissolved(chosen))
        if key.tag in chosen
        and not lent.is_captured
        and (is_wanted(chosen[key.tag], key.backup) or (is_leaving and chosen[key.tag].resident_bytes > 0))
    ]
    segments: list[Segment] = []
    if backend is not None:
        seen = look_at(backend, [lent for _, lent in looked_at])
        for key, lent in looked_at:
            if is_leaving:
                _note_cached(key.tag, lent, seen[lent] or ())
            if is_wanted(chosen[key.tag], key.backup):
                segments += seen[lent] or ()
    if own is not None and own.tag in chosen and is_wanted(chosen[own.tag], own.backup):
        segments += detour.idle_segments()
    ranges = free_ranges(segments)
    return (ranges, as_of) if are_apart(ranges) else ([], 0)


def _note_cached(tag: str, lent: leases.LentPool, segments: Sequence[Segment]) -> None:
    """Notes which of a pool's segments leave as torch's cache, and not as tensors that may die meanwhile."""
    free = {segment.address for segment in segments if segment.is_free}
    if free or lent.cached:
        gone = {info.address for info in _core.allocations(tag) if info.resident_bytes == 0 or info.is_paused}
        lent.cached = (lent.cached & gone) | (free - gone)


def look_at(
    backend: pools.PoolBackend, lents: Sequence[leases.LentPool]
) -> dict[leases.LentPool, list[Segment] | None]:
    """The segments of each of these pools; None where that can't be told. Of many pools torch is asked at once."""
    if len(lents) <= FEW_POOLS:
        return {lent: look(backend, lent) for lent in lents}
    try:
        segments = backend.segments_of([lent.pool for lent in lents])
    except Exception as error:  # as in `look`
        _logger.debug("torch's snapshot of all pools is not understood, so all of it counts as used: %r", error)
        return dict.fromkeys(lents)
    return {lent: None if found is None else list(found) for lent, found in zip(lents, segments, strict=True)}


def look(backend: pools.PoolBackend, lent: leases.LentPool) -> list[Segment] | None:
    """The pool's segments; None where that can't be told."""
    try:
        segments = backend.segments(lent.pool)
    except Exception as error:  # what torch tells of itself has no promised shape
        _logger.debug("torch's snapshot of a pool is not understood, so all of it counts as used: %r", error)
        return None
    return None if segments is None else list(segments)
