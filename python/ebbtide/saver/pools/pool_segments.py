"""The segments of pools, as torch tells them. An account that can't be read counts as none."""

import logging
from collections.abc import Sequence

from ebbtide.saver.pools import backends, region_pools
from ebbtide.saver.values.segments import Segment

FEW_POOLS = 8  # what torch is asked about one by one: its account of all pools is as long as all that it holds

_logger = logging.getLogger(__name__)


def look_at(
    backend: backends.PoolBackend, lents: Sequence[region_pools.LentPool]
) -> dict[region_pools.LentPool, list[Segment] | None]:
    """The segments of each of these pools; None where that can't be told. Of many pools torch is asked at once."""
    if len(lents) <= FEW_POOLS:
        return {lent: look(backend, lent) for lent in lents}
    try:
        segments = backend.segments_of([lent.pool for lent in lents])
    except Exception as error:  # as in `look`
        _logger.debug("torch's snapshot of all pools is not understood, so all of it counts as used: %r", error)
        return dict.fromkeys(lents)
    return {lent: None if found is None else list(found) for lent, found in zip(lents, segments, strict=True)}


def look(backend: backends.PoolBackend, lent: region_pools.LentPool) -> list[Segment] | None:
    """The pool's segments; None where that can't be told."""
    try:
        segments = backend.segments(lent.pool)
    except Exception as error:  # what torch tells of itself has no promised shape
        _logger.debug("torch's snapshot of a pool is not understood, so all of it counts as used: %r", error)
        return None
    return None if segments is None else list(segments)
