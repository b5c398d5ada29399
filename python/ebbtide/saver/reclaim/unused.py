"""Which memory of some tags nobody uses: free blocks inside torch's segments. No pause or resume need copy them.

What holds here:
- The ranges are true as of a moment: the number of the newest lease is read first, then it is made sure that none of
  the tags is leased, then torch is asked. Only who holds a lease takes free blocks, so a lease that is newer makes the
  core forget the ranges, and one that was older is over.
- A graph's replay uses what torch calls free: pools that a capture may have taken memory from are never asked.
- It saves work and nothing else: whatever goes wrong here means that more is copied.
"""

from collections.abc import Callable

from ebbtide import _core
from ebbtide.saver.pools import backends, bypass, pool_segments, region_pools
from ebbtide.saver.state import program
from ebbtide.saver.state.known_tags import find_tags
from ebbtide.saver.values.arguments import AS_ALLOCATED_CODE, NO_BACKUP_CODE
from ebbtide.saver.values.segments import Range, Segment, are_apart, free_ranges


def find(names: list[str], backup: int) -> tuple[list[Range], int]:
    """The unused ranges of these tags (none: of every tag), sorted and apart, and the lease that they are true as of.

    Args:
        backup: the code of the pause; where nothing is kept, nothing needs to be found.
    """
    if backup == NO_BACKUP_CODE:
        return [], 0

    def is_wanted(info: "_core.TagInfo", own_backup: int) -> bool:
        return info.resident_bytes > 0 and (backup != AS_ALLOCATED_CODE or own_backup != NO_BACKUP_CODE)

    return _find(names, is_wanted)


def find_stored(names: list[str]) -> tuple[list[Range], int]:
    """The same, of what is away and has a backup."""
    return _find(names, lambda info, _: info.stored_bytes > 0)


def find_for_swap(leaving: list[str], returning: list[str], backup: int) -> tuple[list[Range], int]:
    """The same, of both sides."""
    (ranges, as_of), (others, others_as_of) = find(leaving, backup), find_stored(returning)
    return sorted(ranges + others), min(as_of, others_as_of) if ranges and others else max(as_of, others_as_of)


def _find(names: list[str], is_wanted: Callable[["_core.TagInfo", int], bool]) -> tuple[list[Range], int]:
    backend, own = backends.existing_backend(), program.own()
    if (backend is None and own is None) or not _core.get_option("skip_unused"):
        return [], 0
    as_of = _core.last_lease()
    chosen = find_tags(names)
    if any(info.lease_count for info in chosen.values()):
        return [], 0
    wanted = [
        pool
        for key, pool in (*region_pools.registry.idle(chosen), *region_pools.registry.dissolved(chosen))
        if key.tag in chosen and is_wanted(chosen[key.tag], key.backup) and not pool.is_captured
    ]
    segments: list[Segment] = []
    if backend is not None:
        segments += [segment for found in pool_segments.look_at(backend, wanted).values() for segment in found or ()]
    if own is not None and own.tag in chosen and is_wanted(chosen[own.tag], own.backup):
        segments += bypass.idle_segments()
    ranges = free_ranges(segments)
    return (ranges, as_of) if are_apart(ranges) else ([], 0)
