"""The free blocks, by torch, in the pools of tags that are to move: neither their bytes nor their memory need to.

- A pause and a resume copy no free blocks. The core ignores blocks that were free as of a lease if a newer one was
  opened since.
- A segment that became wholly free while it was away held tensors that died. It is trimmed: its backup is deleted and a
  resume claims no memory for it. Its memory comes back, as zeros, when its pool is leased again.
- A segment that was free already when it left is torch's cache. It has no backup, and a resume brings it back, as
  zeros, so that torch need not map anew. If there is no room for it, it is trimmed as well.
- No thread enters a pool whose memory is away. Where something is dead, the pools are looked at again while no thread
  can lease them, and trimmed.
- Pools that a capture may have allocated from are never looked at: a replay uses blocks that torch calls free.
- With `skip_unused=False` nothing is looked at: the caller does not want to rely on torch's free blocks.
- This only saves work and memory. If anything goes wrong here, more is copied and kept.
"""

import logging
from collections.abc import Iterator, Sequence

from ebbtide import _core
from ebbtide.errors import Error
from ebbtide.saver.pools import bypass
from ebbtide.saver.pools.pool_segments import SegmentsByPool, free_in, look_at
from ebbtide.saver.pools.region_pools import PoolKey, RegionPool, registry
from ebbtide.saver.reclaim import spilled
from ebbtide.saver.state.known_tags import find_tags
from ebbtide.saver.values.arguments import PauseRequest
from ebbtide.saver.values.segments import Range, Segment, are_apart, free_ranges

_logger = logging.getLogger(__name__)


class Look:
    """torch's report of the pools of some tags (none: all), read once for one operation.

    It is valid as of one lease: the number of the newest lease is read first, then which tags have an open one, and
    torch last. Only a leaseholder allocates free blocks, so a free block stays free as long as no newer lease was
    opened and no tag has an open one.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._may_ask = _core.get_setting("skip_unused") == b"1"
        self._as_of = _core.last_lease()
        self._infos = find_tags(names)
        self._pools = [each for each in registry.unleased(self._infos) if not each[1].is_captured]
        self._report: SegmentsByPool | None = None

    @property
    def _seen(self) -> SegmentsByPool:
        if self._report is None:
            self._report = look_at([pool for _, pool in self._pools])
        return self._report

    def release_dead(self, *, also_cached: bool = False) -> bool:
        """Trims segments that are away and wholly free by now. Returns whether there were any.

        Args:
            also_cached: include segments that were free already when they left.
        """
        away = {tag for tag, i in self._infos.items() if i.stored_bytes or i.dropped_bytes or i.paused_host_bytes}
        pools = [(key, pool) for key, pool in self._pools if key.tag in away] if away else []
        if not self._may_ask or not pools:
            return False
        is_any = False
        try:
            if any(pool.is_dissolved for _, pool in pools):
                spilled.release_dissolved(away)
            idle = [(key, pool) for key, pool in pools if not pool.is_dissolved]
            if not any(self._dead(idle, self._seen, also_cached)):
                return False  # the usual case, in which no pool need be withheld
            with registry.withheld(away) as withheld:
                seen = look_at([pool for _, pool in withheld])
                for tag, pool, dead in self._dead(withheld, seen, also_cached):
                    spilled.trim_pools([tag], {pool: dead})
                    is_any = True
        except (Error, RuntimeError) as error:  # torch's own are RuntimeErrors
            _logger.debug("memory that died while it was paused stays: %r", error)
        return is_any

    def _dead(
        self, pools: Sequence[tuple[PoolKey, RegionPool]], seen: SegmentsByPool, also_cached: bool
    ) -> Iterator[tuple[str, RegionPool, set[int]]]:
        """The tag of each pool in which something is dead, the pool, and the addresses of its dead segments."""
        for key, pool in pools:
            free = free_in(seen[pool]) - (set() if also_cached else pool.cached)
            is_leased = self._infos[key.tag].lease_count > 0
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

    def unused(self, leaving: PauseRequest | None, returning: Sequence[str] | None = None) -> tuple[list[Range], int]:
        """The unused ranges that leave or return with a backup, sorted and disjoint, and the lease as of which
        they are valid. Records which segments leave as torch's cache.

        Args:
            leaving: the pause; None: nothing leaves.
            returning: the tags that come back (an empty list: all); None: none.
        """

        if not self._may_ask:
            if leaving is not None:  # the ranges of an earlier pause must not be taken for this one's
                for _, pool in self._pools:
                    pool.cached.clear()
            return [], 0
        leaves = {} if leaving is None else self._at_rest(leaving.names)
        returns = {} if returning is None else self._at_rest(returning)
        if not leaves and not returns:
            return [], 0

        def is_wanted(tag: str, own_backup: int) -> bool:
            if tag in returns and returns[tag].stored_bytes > 0:
                return True
            is_leaving = tag in leaves and leaves[tag].resident_bytes > 0
            return is_leaving and leaving is not None and leaving.is_kept(tag, own_backup)

        segments: list[Segment] = []
        for key, pool in self._pools:
            if key.tag in leaves and leaves[key.tag].resident_bytes > 0:
                _record_cached(key.tag, pool, free_in(self._seen[pool]))
            if is_wanted(key.tag, key.backup):
                segments += self._seen[pool] or ()
        guarded = bypass.guarded_tags()
        if guarded and any(is_wanted(tag, backup) for tag, backup in guarded.items()):
            segments += bypass.idle_segments()
        ranges = free_ranges(segments)
        return (ranges, self._as_of) if are_apart(ranges) else ([], 0)

    def _at_rest(self, names: Sequence[str]) -> "dict[str, _core.TagInfo]":
        """The tags of one side (no name: all). None of them where a thread is in a region of one: it may allocate free
        blocks now. The other side of a swap is apart."""
        side = {tag: info for tag, info in self._infos.items() if not names or tag in names}
        leased = [tag for tag, info in side.items() if info.lease_count]
        return {} if leased else side


def _record_cached(tag: str, pool: RegionPool, free: set[int]) -> None:
    """Records which of a pool's segments leave as torch's cache, unlike tensors that may die while they are away."""
    if free or pool.cached:
        gone = {info.address for info in _core.allocations(tag) if info.resident_bytes == 0 or info.is_paused}
        pool.cached = (pool.cached & gone) | (free - gone)


def make_room(names: Sequence[str]) -> bool:
    """Shrinks a resume of these tags, for which the device has too little room, to living tensors. Returns whether that
    is less.
    """
    return Look(names).release_dead(also_cached=True)
