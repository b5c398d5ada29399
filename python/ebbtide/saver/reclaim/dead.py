"""Tensors that died while their tag was paused: a resume needs neither their bytes nor device memory for them.

torch keeps the block of a dead tensor as free in its pool and notifies nobody. So each operation on a paused tag looks
at the tag's pools.

- A segment that became wholly free while it was away is trimmed. Its backup is deleted and a resume skips it. Its
  memory comes back, as zeros, when its pool is leased again.
- A segment that was free already when it left is torch's cache. It has no backup, and a resume brings it back, as
  zeros, so that torch need not map anew. If there is no room for it, it is trimmed as well.
- Nobody enters a pool whose memory is away. Where something is dead, the pools are looked at again while no thread can
  lease them, and trimmed.
- Pools that a capture may have allocated from are never looked at: a replay uses blocks that torch calls free.
- With `skip_unused=False` nothing is looked at: the caller does not want to rely on what torch calls free.
- This only saves memory. If anything goes wrong here, more is kept.
"""

import logging
from collections.abc import Iterator, Sequence

from ebbtide import _core
from ebbtide.errors import Error
from ebbtide.saver.pools import backends, region_pools
from ebbtide.saver.pools.pool_segments import Look, Seen, look_at
from ebbtide.saver.pools.region_pools import PoolKey, RegionPool
from ebbtide.saver.reclaim import spilled

_logger = logging.getLogger(__name__)


def release(look: Look, *, also_cached: bool = False) -> bool:
    """Trims segments that are away and wholly free by now: their backups are deleted, and a resume claims no device
    memory for them.

    Args:
        look: a new one, at the tags that this is for.
        also_cached: include segments that were free already when they left.

    Returns:
        Whether there were any.
    """
    backend = backends.existing_backend()
    if backend is None or not look.may_ask:
        return False
    away = {tag: i for tag, i in look.infos.items() if i.stored_bytes or i.dropped_bytes or i.left_bytes}
    if not away:
        return False
    is_any = False
    try:
        pools = [(key, pool) for key, pool in look.pools if key.tag in away]
        if any(pool.is_dissolved for _, pool in pools):
            spilled.release_dissolved(away)
        idle = [(key, pool) for key, pool in pools if not pool.is_dissolved and not pool.is_captured]
        if not any(_find(look, idle, look.at(backend, [pool for _, pool in idle]), also_cached)):
            return False  # the usual case, in which no pool need be withheld
        with region_pools.registry.withheld(away) as withheld:
            seen = look_at(backend, [pool for _, pool in withheld])
            for tag, pool, dead in _find(look, withheld, seen, also_cached):
                pool.trimmed |= dead  # set before the trim: one that fails midway leaves some of them away
                _core.trim([tag], sorted(dead))
                is_any = True
    except (Error, RuntimeError) as error:  # torch's own are RuntimeErrors
        _logger.debug("what died while it was paused stays where it is: %r", error)
    return is_any


def make_room(names: Sequence[str]) -> bool:
    """Shrinks a resume of these tags, for which the device has too little room, to living tensors. Returns whether that
    is less.
    """
    return release(Look(names), also_cached=True)


def _find(
    look: Look, pools: Sequence[tuple[PoolKey, RegionPool]], seen: Seen, also_cached: bool
) -> Iterator[tuple[str, RegionPool, set[int]]]:
    """The tag of each pool in which something is dead, the pool, and the addresses of its dead segments."""
    for key, pool in pools:
        free = {segment.address for segment in seen[pool] or () if segment.is_free}
        free -= set() if also_cached else pool.cached
        is_leased = look.infos[key.tag].lease_count > 0
        dead = {
            info.address
            for info in (_core.allocations(key.tag) if free else ())
            # While a region of the tag is open, the core trims only segments that are away as a whole.
            if info.address in free
            and not info.is_trimmed
            and (info.resident_bytes == 0 or (info.is_paused and not is_leased))
        }
        if dead:
            yield key.tag, pool, dead
