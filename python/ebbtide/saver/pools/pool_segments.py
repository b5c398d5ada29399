"""The segments of pools, as torch tells them. An account that can't be read counts as none."""

import logging
from collections.abc import Sequence

from ebbtide.saver.pools import backends, region_pools
from ebbtide.saver.values.segments import Segment

FEW_POOLS = 8  # what torch is asked about one by one: its account of all pools is as long as all that it holds

_logger = logging.getLogger(__name__)


def look_at(
    backend: backends.PoolBackend, pools: Sequence[region_pools.RegionPool]
) -> dict[region_pools.RegionPool, list[Segment] | None]:
    """The segments of each of these pools; None where that can't be told. Of many pools torch is asked at once."""
    if len(pools) <= FEW_POOLS:
        return {pool: look(backend, pool) for pool in pools}
    try:
        segments = backend.segments_of([pool.handle for pool in pools])
    except Exception as error:  # as in `look`
        _logger.debug("torch's snapshot of all pools is not understood, so all of it counts as used: %r", error)
        return dict.fromkeys(pools)
    return {pool: None if found is None else list(found) for pool, found in zip(pools, segments, strict=True)}


def look(backend: backends.PoolBackend, pool: region_pools.RegionPool) -> list[Segment] | None:
    """The pool's segments; None where that can't be told."""
    try:
        segments = backend.segments(pool.handle)
    except Exception as error:  # what torch tells of itself has no promised shape
        _logger.debug("torch's snapshot of a pool is not understood, so all of it counts as used: %r", error)
        return None
    return None if segments is None else list(segments)
