"""The segments of pools, as torch reports them. A pool whose report cannot be read has no known segments."""

import logging
from collections.abc import Sequence
from typing import TypeAlias

from ebbtide.saver.pools import backends, region_pools
from ebbtide.saver.values.segments import Segment

_logger = logging.getLogger(__name__)

SegmentsByPool: TypeAlias = dict[region_pools.RegionPool, Sequence[Segment] | None]


def look_at(pools: Sequence[region_pools.RegionPool]) -> SegmentsByPool:
    """The segments of each of these pools; None where they are unknown."""
    backend = backends.existing_backend()
    if backend is None or not pools:
        return {}
    try:
        segments = backend.segments_of([pool.handle for pool in pools])
    except Exception as error:  # the format of torch's snapshot is not stable
        _logger.debug("torch's snapshot of pools is not understood, so all of them count as used: %r", error)
        return dict.fromkeys(pools)
    return dict(zip(pools, segments, strict=True))


def free_in(segments: Sequence[Segment] | None) -> set[int]:
    """The addresses of the segments in which nothing is in use."""
    return {segment.address for segment in segments or () if segment.is_free}
