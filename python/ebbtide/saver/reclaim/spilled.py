"""Free memory that has spilled: torch would hand it out again, slow as it is.

What holds here:
- A free segment that the device has room for loses its memory, which comes back there when its pool is leased again.
- Where there is no room, the pool's own free segments may be what fills the device, and torch gives back none of them
  as long as the pool may be entered. So the pool is dissolved: nobody enters it any more, what is free in it goes back
  now, the rest as it gets free, and the next lease makes a fresh pool, which takes the device first.
- The same goes for free segments whose memory was trimmed: it would have to come back, slow, with the next lease.
- Pools that a capture may have taken memory from are left alone, as always.
"""

import contextlib
from collections.abc import Sequence

from ebbtide import _core
from ebbtide.errors import StateError
from ebbtide.saver.pools import backends, captures, pool_segments, region_pools
from ebbtide.saver.state.known_tags import allocations_of
from ebbtide.saver.values.arguments import NO_OVERFLOW_CODE


def release_free(tag: str) -> None:
    """Gives up the memory of the tag's free segments that have spilled, wherever it would come back. A tag whose region
    is open is left alone, but for its dissolved pools."""
    release_dissolved([tag])
    backend = backends.existing_backend()
    spilled = {info.address for info in _core.allocations(tag) if info.host_bytes}
    if backend is None or not spilled:
        return
    with region_pools.registry.withheld([tag]) as withheld:
        for _, pool in withheld:
            segments = pool_segments.look(backend, pool) or ()
            _trim(tag, pool, {segment.address for segment in segments if segment.is_free} & spilled)


def prefer_device(tag: str) -> None:
    """Makes sure that what torch cuts next from the tag's idle pools lies on the device, if need be by dissolving
    them."""
    backend = backends.existing_backend()
    slow = {info.address: info for info in _core.allocations(tag) if info.host_bytes or info.is_trimmed}
    if backend is not None and slow:
        room = {info.device: _core.query_device(info.device).room_bytes for info in slow.values()}
        with region_pools.registry.withheld([tag]) as withheld:
            for key, pool in withheld:
                if key.overflow == NO_OVERFLOW_CODE:
                    continue
                segments = pool_segments.look(backend, pool) or ()
                found = [slow[segment.address] for segment in segments if segment.is_free and segment.address in slow]
                needed_bytes = sum(info.size_bytes if info.is_trimmed else info.host_bytes for info in found)
                if needed_bytes > room.get(pool.device, 0):
                    pool.is_dissolved = True  # before it is: half of it may be done
                    if not backend.dissolve(pool.handle):
                        pool.is_dissolved = False
                elif found:
                    room[pool.device] -= needed_bytes
                    _trim(tag, pool, {info.address for info in found if not info.is_trimmed})
    release_dissolved([tag])


def release_dissolved(tags: Sequence[str]) -> "list[_core.AllocationInfo]":
    """Gives back what is free by now in dissolved pools of these tags, and tells what it was."""
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


def _trim(tag: str, pool: region_pools.RegionPool, addresses: set[int]) -> None:
    if not addresses:
        return
    pool.trimmed |= addresses  # before they are: a trim that fails midway leaves some of them away
    with contextlib.suppress(StateError):  # somebody has entered the tag, or captures
        _core.trim([tag], sorted(addresses))
