"""Free blocks inside torch's segments: memory of a tag that no pause or resume needs to copy.

- The ranges are valid as of one lease (see `Look`), and none are given while a tag has an open one. The core ignores
  the ranges if a newer lease was opened since.
- Pools that a capture may have allocated from are never asked: a replay uses blocks that torch calls free.
- This only saves work. If anything goes wrong here, more is copied.
"""

from collections.abc import Callable, Collection, Sequence

from ebbtide import _core
from ebbtide.saver.pools import backends, bypass, region_pools
from ebbtide.saver.pools.pool_segments import Look
from ebbtide.saver.values.arguments import NO_BACKUP_CODE, Leaving
from ebbtide.saver.values.segments import Range, Segment, are_apart, free_ranges


def find(leaving: Leaving, look: Look | None = None) -> tuple[list[Range], int]:
    """The unused ranges of what leaves, sorted and disjoint, and the lease as of which they are valid.

    Without a backup there is nothing to skip.

    Args:
        look: one at these tags that served `dead.release`; None takes a new one.
    """

    def is_wanted(info: "_core.TagInfo", own_backup: int) -> bool:
        return info.resident_bytes > 0 and leaving.is_kept(info.tag, own_backup)

    return _find(look or Look(leaving.names), is_wanted, is_leaving=True)


def find_stored(look: Look) -> tuple[list[Range], int]:
    """Like `find`, for memory that is away and has a backup."""
    return _find(look, lambda info, _: info.stored_bytes > 0)


def find_resident(names: list[str]) -> list[Range]:
    """The unused ranges of what is resident and has a backup, for copies that may be out of date."""
    return _find(Look(names), lambda info, backup: backup != NO_BACKUP_CODE and info.resident_bytes > 0)[0]


def find_for_swap(leaving: Leaving, returning: list[str], look: Look) -> tuple[list[Range], int]:
    """Like `find`, for both sides of a swap."""
    found = find(leaving, look.part(leaving.names))[0] + find_stored(look.part(returning))[0]
    return sorted(found), look.as_of


def _find(
    look: Look, is_wanted: Callable[["_core.TagInfo", int], bool], is_leaving: bool = False
) -> tuple[list[Range], int]:
    backend, shared = backends.existing_backend(), bypass.guarded_tags()
    if backend is None and not shared:
        return [], 0
    if not look.may_ask:
        if is_leaving:
            _forget_cached(look.infos)
        return [], 0
    infos = look.infos
    if any(info.lease_count for info in infos.values()):
        return [], 0
    segments: list[Segment] = []
    if backend is not None:
        chosen: list[tuple[str, region_pools.RegionPool, bool]] = []
        for key, pool in look.pools:
            info = infos[key.tag]
            is_counted = is_wanted(info, key.backup)
            if not pool.is_captured and (is_counted or (is_leaving and info.resident_bytes > 0)):
                chosen.append((key.tag, pool, is_counted))
        seen = look.at(backend, [pool for _, pool, _ in chosen])
        for tag, pool, is_counted in chosen:
            found = seen[pool] or ()
            if is_leaving:
                _note_cached(tag, pool, found)
            if is_counted:
                segments += found
    if any(tag in infos and is_wanted(infos[tag], backup) for tag, backup in shared.items()):
        segments += bypass.idle_segments()
    ranges = free_ranges(segments)
    return (ranges, look.as_of) if are_apart(ranges) else ([], 0)


def _forget_cached(tags: Collection[str]) -> None:
    """Nobody looks at what leaves now, so what an earlier pause saw must not be taken for it."""
    for _, pool in region_pools.registry.unleased(tags):
        pool.cached.clear()


def _note_cached(tag: str, pool: region_pools.RegionPool, segments: Sequence[Segment]) -> None:
    """Records which of a pool's segments leave as torch's cache, unlike tensors that may die while they are away."""
    free = {segment.address for segment in segments if segment.is_free}
    if free or pool.cached:
        gone = {info.address for info in _core.allocations(tag) if info.resident_bytes == 0 or info.is_paused}
        pool.cached = (pool.cached & gone) | (free - gone)
