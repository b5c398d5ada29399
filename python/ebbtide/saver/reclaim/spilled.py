"""Free memory that has spilled to the host: torch would hand it out again, slow as it is.

- If the device has room for a free segment, its host memory is released. The segment comes back on the device when its
  pool is leased again.
- If the device has no room, the pool's own free segments may be what fills it, and torch frees none of them while the
  pool can be entered. So the pool is dissolved: no thread enters it any more, and its free segments are freed now, the
  others when they become free. The next lease makes a fresh pool, which prefers the device.
- The same holds for free segments that were trimmed: they would come back on the host with the next lease.
- Pools that a capture may have allocated from are left alone.
"""

import contextlib
from collections.abc import Collection, Mapping

from ebbtide import _core
from ebbtide.errors import StateError
from ebbtide.saver.pools import backends, captures, pool_segments, region_pools
from ebbtide.saver.state.known_tags import allocations_of
from ebbtide.saver.values.arguments import NO_OVERFLOW_CODE


def release_free(tag: str) -> None:
    """Releases the memory of the tag's free segments that have spilled, wherever they would come back. While a region
    of the tag is open, only its dissolved pools are touched.
    """
    release_dissolved([tag])
    backend = backends.existing_backend()
    spilled = {info.address for info in _core.allocations(tag) if info.host_bytes}
    if backend is None or not spilled:
        return
    with region_pools.registry.withheld([tag]) as withheld:
        for _, pool in withheld:
            trim_pool(tag, pool, _free_in(backend, pool) & spilled)


def prefer_device(tag: str) -> None:
    """Makes sure that torch's next blocks from the tag's idle pools lie on the device; dissolves pools if it must."""
    backend = backends.existing_backend()
    slow = {info.address: info for info in _core.allocations(tag) if info.host_bytes or info.is_trimmed}
    if backend is not None and slow:
        room = {info.device: _core.query_device(info.device).room_bytes for info in slow.values()}
        with region_pools.registry.withheld([tag]) as withheld:
            for key, pool in withheld:
                _prefer_device_in(key, pool, backend, slow, room)
    release_dissolved([tag])


def _prefer_device_in(
    key: region_pools.PoolKey,
    pool: region_pools.RegionPool,
    backend: backends.PoolBackend,
    slow: "Mapping[int, _core.AllocationInfo]",
    room: dict[int, int],
) -> None:
    """slow: what lies on the host or was trimmed, by address. room: bytes by device, less what this takes of it."""
    if key.overflow == NO_OVERFLOW_CODE:
        return
    found = [slow[address] for address in _free_in(backend, pool) if address in slow]
    needed_bytes = sum(info.size_bytes if info.is_trimmed else info.host_bytes for info in found)
    if needed_bytes > room.get(pool.device, 0):
        dissolve_pool(backend, pool)
    elif found:
        room[pool.device] -= needed_bytes
        trim_pool(key.tag, pool, {info.address for info in found if not info.is_trimmed})


def _free_in(backend: backends.PoolBackend, pool: region_pools.RegionPool) -> set[int]:
    """The addresses of segments in which nothing is in use."""
    return {segment.address for segment in pool_segments.look(backend, pool) or () if segment.is_free}


def dissolve(tag: str, backup: int) -> None:
    """Ends the idle pools of this tag and backup, a core code: torch frees what is free in them now, and the rest at
    the first flush after it became free. Nothing happens to pools that a capture has marked, and before torch 2.10."""
    backend = backends.existing_backend()
    if backend is None:
        return
    with region_pools.registry.withheld([tag]) as withheld:
        for _, pool in filter(lambda each: each[0].backup == backup, withheld):
            dissolve_pool(backend, pool)
    release_dissolved([tag])


def release_dissolved(tags: Collection[str]) -> "list[_core.AllocationInfo]":
    """Frees what is free by now in dissolved pools of these tags; returns the allocations that went."""
    backend = backends.existing_backend()
    dissolved = region_pools.registry.dissolved(tags)
    if backend is None or not dissolved:
        return []
    pools = [pool for _, pool in dissolved]
    held = pool_segments.look_at(backend, pools)
    free = {segment.address for segments in held.values() for segment in segments or () if segment.is_free}
    of_tags = [key.tag for key, _ in dissolved]
    found = [info for info in allocations_of(of_tags) if info.address in free] if free else []
    if free and not captures.is_capturing():
        backend.give_back([pool.handle for pool in pools])
        held = pool_segments.look_at(backend, pools)
    region_pools.registry.forget([(key, pool) for key, pool in dissolved if held[pool] == []])
    kept = {segment.address for segments in held.values() for segment in segments or ()}
    return [info for info in found if info.address not in kept]


def dissolve_pool(backend: backends.PoolBackend, pool: region_pools.RegionPool) -> None:
    """No thread enters it from now on, where torch can dissolve it."""
    pool.is_dissolved = True  # set before: a failure may leave it half dissolved
    if not backend.dissolve(pool.handle):
        pool.is_dissolved = False


def trim_pool(tag: str, pool: region_pools.RegionPool, addresses: set[int]) -> None:
    """Releases the memory of these segments of a withheld pool, unless a thread has entered the tag, or captures."""
    if not addresses:
        return
    pool.trimmed |= addresses  # set before the trim: one that fails midway leaves some of them away
    with contextlib.suppress(StateError):
        _core.trim([tag], sorted(addresses))
