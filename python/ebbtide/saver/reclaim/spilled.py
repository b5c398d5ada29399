"""Free memory that has spilled to the host: torch would hand it out again, slow as it is.

- If the device has room for a free segment, its host memory is released. The segment comes back on the device when its
  pool is leased again.
- If the device has no room, the pool's own free segments may fill it, and torch frees none of them while the
  pool can be entered. So the pool is dissolved: no thread enters it any more, and its free segments are freed now, the
  others when they become free. The next lease makes a fresh pool, which prefers the device.
- The same holds for free segments that were trimmed: they would come back on the host with the next lease.
- Pools that a capture may have allocated from are left alone.
"""

import contextlib
from collections.abc import Collection, Mapping, Sequence

from ebbtide import _core
from ebbtide.errors import StateError
from ebbtide.saver.pools import backends, captures
from ebbtide.saver.pools.pool_segments import free_in, look_at
from ebbtide.saver.pools.region_pools import PoolKey, RegionPool, registry
from ebbtide.saver.state.known_tags import allocations_of
from ebbtide.saver.values.arguments import NO_OVERFLOW_CODE


def release_free(tag: str) -> None:
    """Releases the memory of the tag's free segments that have spilled, wherever they would come back. While a region
    of the tag is open, only its dissolved pools are touched.
    """
    release_dissolved([tag])
    spilled = {info.address for info in _core.allocations(tag) if info.host_bytes}
    if spilled:
        with registry.withheld([tag]) as withheld:
            for pool, segments in look_at([pool for _, pool in withheld]).items():
                try_to_trim(tag, pool, free_in(segments) & spilled)


def prefer_device(tag: str) -> None:
    """Makes sure that torch's next blocks from the tag's idle pools lie on the device; dissolves pools if it must."""
    slow = {info.address: info for info in _core.allocations(tag) if info.host_bytes or info.is_trimmed}
    if slow:
        with registry.withheld([tag]) as withheld:
            _prefer_device(tag, withheld, slow)
    release_dissolved([tag])


def _prefer_device(
    tag: str, withheld: Sequence[tuple[PoolKey, RegionPool]], slow: "Mapping[int, _core.AllocationInfo]"
) -> None:
    """slow: allocations on the host or trimmed ones, by address."""
    room = {info.device: _core.query_device(info.device).room_bytes for info in slow.values()}
    for pool, segments in look_at([pool for key, pool in withheld if key.overflow != NO_OVERFLOW_CODE]).items():
        found = [slow[address] for address in free_in(segments) if address in slow]
        needed_bytes = sum(info.size_bytes if info.is_trimmed else info.host_bytes for info in found)
        if needed_bytes > room.get(pool.device, 0):
            dissolve_pool(pool)
        elif found:
            room[pool.device] -= needed_bytes
            try_to_trim(tag, pool, {info.address for info in found if not info.is_trimmed})


def dissolve(tag: str, backup: int) -> None:
    """Ends the idle pools of this tag and backup, a core code: torch frees their free segments now, and the rest at
    the first flush after it became free. Nothing happens to pools that a capture has marked, and before torch 2.10."""
    with registry.withheld([tag]) as withheld:
        for _, pool in filter(lambda each: each[0].backup == backup, withheld):
            dissolve_pool(pool)
    release_dissolved([tag])


def release_dissolved(tags: Collection[str]) -> "list[_core.AllocationInfo]":
    """Frees the free segments in dissolved pools of these tags; returns the allocations that went."""
    backend = backends.existing_backend()
    dissolved = registry.dissolved(tags)
    if backend is None or not dissolved:
        return []
    pools = [pool for _, pool in dissolved]
    held = look_at(pools)
    free = set().union(*map(free_in, held.values()))
    found = [info for info in allocations_of([key.tag for key, _ in dissolved]) if info.address in free] if free else []
    if free and not captures.is_capturing():
        backend.give_back([pool.handle for pool in pools])
        held = look_at(pools)
    registry.forget([(key, pool) for key, pool in dissolved if held[pool] == []])
    kept = {segment.address for segments in held.values() for segment in segments or ()}
    return [info for info in found if info.address not in kept]


def dissolve_pool(pool: RegionPool) -> None:
    """No thread enters it from now on, where torch can dissolve it."""
    backend = backends.existing_backend()
    pool.is_dissolved = True  # set before: a failure may leave it half dissolved
    if backend is None or not backend.dissolve(pool.handle):
        pool.is_dissolved = False


def trim_pools(tags: list[str], addresses: Mapping[RegionPool, set[int]]) -> "_core.Report":
    """Releases the memory of these segments of withheld pools, which come back with the next lease of their pool."""
    for pool, trimmed in addresses.items():
        pool.trimmed |= trimmed  # set before the trim: one that fails midway leaves some of them away
    return _core.trim(tags, addresses=sorted(set().union(*addresses.values())))


def try_to_trim(tag: str, pool: RegionPool, addresses: set[int]) -> None:
    """The same, unless a thread has entered the tag, or captures."""
    if addresses:
        with contextlib.suppress(StateError):
            trim_pools([tag], {pool: addresses})
