"""Tensors that died while their tag was paused: nobody wants their bytes, nor device memory for them at a resume.

torch keeps a dead tensor's block as free in its pool, and tells nobody. So the pools of a paused tag are looked at when
something touches the tag.

What holds here:
- A wholly free segment that is away is trimmed: its backup goes, a resume leaves it out, and its memory comes back, as
  zeros, when its pool is leased again.
- Nobody leases a pool while it is looked at; a pool whose memory is away is entered by nobody.
- A graph's replay uses what torch calls free: pools that a capture may have taken memory from are never looked at.
- Who switches skip_unused off does not rely on what torch calls free: then nothing is looked at.
- It saves memory and nothing else: whatever goes wrong here means that more is kept.
"""

import logging
from collections.abc import Sequence

from ebbtide import _core
from ebbtide.errors import Error
from ebbtide.saver.pools import backends, pool_segments, region_pools
from ebbtide.saver.reclaim import spilled
from ebbtide.saver.state.known_tags import find_tags
from ebbtide.saver.values.segments import Segment

_logger = logging.getLogger(__name__)


def release(names: Sequence[str]) -> None:
    """Gives up the backups of segments of these tags (none: every tag) that are away and wholly free by now."""
    backend = backends.existing_backend()
    if backend is None or not _core.get_option("skip_unused"):
        return
    infos = find_tags(list(names))
    away = [tag for tag, info in infos.items() if info.stored_bytes or info.dropped_bytes or info.left_bytes]
    if not away:
        return
    try:
        spilled.release_dissolved(away)
        with region_pools.registry.withheld(away) as withheld:
            seen = pool_segments.look_at(backend, [pool for _, pool in withheld])
            for key, pool in withheld:
                _trim(key.tag, pool, seen[pool] or (), is_leased=bool(infos[key.tag].lease_count))
    except (Error, RuntimeError) as error:  # torch's own are RuntimeErrors
        _logger.debug("what died while it was paused stays where it is: %r", error)


def _trim(tag: str, pool: region_pools.RegionPool, segments: Sequence[Segment], *, is_leased: bool) -> None:
    free = {segment.address for segment in segments if segment.is_free}
    dead = {
        info.address
        for info in (_core.allocations(tag) if free else ())
        # Of a tag whose region is open, only what is away as a whole: the core refuses the rest.
        if info.address in free
        and not info.is_trimmed
        and (info.resident_bytes == 0 or (info.is_paused and not is_leased))
    }
    if dead:
        pool.trimmed |= dead  # before they are: a trim that fails midway leaves some of them away
        _core.trim([tag], sorted(dead))
