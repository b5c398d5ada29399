"""The segments of pools, as torch reports them. A pool whose report cannot be read has no known segments."""

import copy
import logging
from collections.abc import Sequence
from typing import TypeAlias

from ebbtide import _core
from ebbtide.saver.pools import backends, region_pools
from ebbtide.saver.state.known_tags import find_tags
from ebbtide.saver.values.segments import Segment

FEW_POOLS = 8  # asked about one by one; the snapshot of all pools lists everything that torch holds

_logger = logging.getLogger(__name__)

Seen: TypeAlias = dict[region_pools.RegionPool, list[Segment] | None]


def look_at(backend: backends.PoolBackend, pools: Sequence[region_pools.RegionPool]) -> Seen:
    """The segments of each of these pools; None where they are unknown. Many pools are read from one snapshot."""
    if len(pools) <= FEW_POOLS:
        return {pool: look(backend, pool) for pool in pools}
    try:
        segments = backend.segments_of([pool.handle for pool in pools])
    except Exception as error:  # as in `look`
        _logger.debug("torch's snapshot of all pools is not understood, so all of it counts as used: %r", error)
        return dict.fromkeys(pools)
    return {pool: None if found is None else list(found) for pool, found in zip(pools, segments, strict=True)}


def look(backend: backends.PoolBackend, pool: region_pools.RegionPool) -> list[Segment] | None:
    """The pool's segments; None where they are unknown."""
    try:
        segments = backend.segments(pool.handle)
    except Exception as error:  # the format of torch's snapshot is not stable
        _logger.debug("torch's snapshot of a pool is not understood, so all of it counts as used: %r", error)
        return None
    return None if segments is None else list(segments)


class Look:
    """What torch says of the pools of some tags, asked once for one operation.

    It is valid as of the lease `as_of`: the number of the newest lease is read first, then which tags have an open one,
    and torch last. Only a leaseholder allocates free blocks, so what was free is free as long as no newer lease was
    opened and `infos` has none open.

    Attributes:
        may_ask: whether the caller relies on what torch says (`skip_unused`).
        infos: what the core knew of the tags (none given: of all) before torch was asked.
        pools: the pools of these tags that nobody leases, dissolved ones too.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.may_ask = _core.get_setting("skip_unused") == b"1"
        self.as_of = _core.last_lease()
        self.infos = find_tags(names)
        self.pools = region_pools.registry.unleased(self.infos)
        self._seen: Seen = {}

    def part(self, names: Sequence[str]) -> "Look":
        """What this look saw, and will see, of some of its tags."""
        part = copy.copy(self)
        part.infos = {name: self.infos[name] for name in names if name in self.infos}
        part.pools = [(key, pool) for key, pool in self.pools if key.tag in part.infos]
        return part

    def at(self, backend: backends.PoolBackend, pools: Sequence[region_pools.RegionPool]) -> Seen:
        """Like `look_at`, of at least these pools; those that were looked at before are as they were then."""
        missing = [pool for pool in pools if pool not in self._seen]
        if missing:
            self._seen.update(look_at(backend, missing))
        return self._seen
