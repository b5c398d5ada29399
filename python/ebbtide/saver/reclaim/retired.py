"""Pools that are given up while their tag is in use, so that torch can free what dies in them.

torch frees nothing of a pool that may still be entered. In a pool that no thread enters any more it frees the segments
that are free now, and later ones at each flush and whenever the device is short of memory.
"""

from collections.abc import Sequence

from ebbtide import _core
from ebbtide.saver.pools import backends, captures, pool_segments, region_pools
from ebbtide.saver.reclaim import spilled
from ebbtide.saver.values.segments import Segment


def retire(tags: Sequence[str], *, only_with_free_segments: bool = False) -> "list[_core.AllocationInfo]":
    """Dissolves the idle pools of these tags that hold memory, and frees what is free in them. The next region of such
    a tag makes a pool.

    Does nothing during a capture, to pools that a capture may have allocated from, and in versions of torch that can't
    dissolve a pool (before 2.10).

    Args:
        only_with_free_segments: leave pools in which every segment is in use, whose free blocks the next region reuses.

    Returns:
        The allocations that were freed.
    """
    backend = backends.existing_backend()
    if backend is None or captures.is_capturing():
        return []
    with region_pools.registry.withheld(tags) as withheld:
        pools = [pool for _, pool in withheld]
        seen = pool_segments.look_at(backend, pools)
        for pool in filter(lambda pool: _is_worth_it(seen[pool] or (), only_with_free_segments), pools):
            spilled.dissolve_pool(backend, pool)
    return spilled.release_dissolved(tags)


def _is_worth_it(segments: Sequence[Segment], only_with_free: bool) -> bool:
    return any(segment.is_free or not only_with_free for segment in segments)
