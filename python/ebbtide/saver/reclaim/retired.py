"""Pools that are given up while their tag is in use, so that torch can free what dies in them.

torch frees nothing of a pool that may still be entered. In a pool that no thread enters any more it frees the segments
that are free now, and later ones at each flush and whenever the device is short of memory.
"""

from collections.abc import Sequence

from ebbtide import _core
from ebbtide.saver.pools import backends, captures, pool_segments, region_pools
from ebbtide.saver.reclaim import spilled
from ebbtide.saver.state.known_tags import allocations_of


def retire(tags: Sequence[str], *, only_with_free_segments: bool = False) -> "list[_core.AllocationInfo]":
    """Dissolves the idle pools of these tags that hold memory, and frees what is free in them. The next region of such
    a tag makes a pool.

    Does nothing during a capture, and to pools that a capture may have allocated from. A torch that can't dissolve a
    pool (before 2.10) keeps it; its free segments are trimmed, and their memory comes back with its next region.

    Args:
        only_with_free_segments: leave pools in which every segment is in use, whose free blocks the next region reuses.

    Returns:
        The allocations that were freed.
    """
    backend = backends.existing_backend()
    if backend is None or captures.is_capturing():
        return []
    resident = {
        info.address for info in allocations_of(tags) if info.resident_bytes
    }  # unless they are paused meanwhile
    with region_pools.registry.withheld(tags) as withheld:
        _dissolve(backend, withheld, resident, only_with_free_segments)
    return spilled.release_dissolved(tags)


def _dissolve(
    backend: backends.PoolBackend,
    withheld: Sequence[tuple[region_pools.PoolKey, region_pools.RegionPool]],
    resident: set[int],
    only_with_free: bool,
) -> None:
    seen = pool_segments.look_at(backend, [pool for _, pool in withheld])
    for key, pool in withheld:
        segments = seen[pool] or ()
        free = {segment.address for segment in segments if segment.is_free}
        if free or (segments and not only_with_free):
            # What shares a driver handle with living memory would keep its own, however torch frees it.
            spilled.trim_pool(key.tag, pool, free & resident)
            spilled.dissolve_pool(backend, pool)
