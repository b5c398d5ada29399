"""Pools that are given up while their tag is in use, so that torch can free dead memory in them.

torch frees nothing of a pool that may still be entered. In a pool that no thread enters any more it frees the segments
that are free now, and later ones at each flush and whenever the device is short of memory.
"""

from collections.abc import Sequence

from ebbtide import _core
from ebbtide.saver.pools import captures
from ebbtide.saver.pools.pool_segments import free_in, look_at
from ebbtide.saver.pools.region_pools import PoolKey, RegionPool, registry
from ebbtide.saver.reclaim import spilled
from ebbtide.saver.state.known_tags import allocations_of


def retire(tags: Sequence[str], *, only_with_free_segments: bool = False) -> "list[_core.AllocationInfo]":
    """Dissolves the idle pools of these tags that hold memory, and frees their free segments. The next region of such
    a tag makes a pool.

    Does nothing during a capture, and to pools that a capture may have allocated from. A torch that can't dissolve a
    pool (before 2.10) keeps it; its free segments are trimmed, and their memory comes back with its next region.

    Args:
        only_with_free_segments: leave pools in which every segment is in use, whose free blocks the next region reuses.

    Returns:
        The allocations that were freed.
    """
    if captures.is_capturing() or not registry.idle(tags):
        return spilled.release_dissolved(tags)
    # unless they are paused meanwhile
    resident = {info.address for info in allocations_of(tags) if info.resident_bytes}
    with registry.withheld(tags) as withheld:
        _dissolve(withheld, resident, only_with_free_segments)
    return spilled.release_dissolved(tags)


def _dissolve(withheld: Sequence[tuple[PoolKey, RegionPool]], resident: set[int], only_with_free: bool) -> None:
    seen = look_at([pool for _, pool in withheld])
    for key, pool in withheld:
        free = free_in(seen[pool])
        if free or (seen[pool] and not only_with_free):
            # A segment that shares a driver handle with living memory would keep its own, however torch frees it.
            spilled.try_to_trim(key.tag, pool, free & resident)
            spilled.dissolve_pool(pool)
