"""Which memory of some tags nobody uses: free blocks inside torch's segments. A pause need not copy them.

What holds here:
- The ranges are true as of a moment: the number of the newest lease is read first, then it is made sure that none of
  the tags is leased, then torch is asked. Only who holds a lease takes free blocks, so a lease that is newer makes the
  core forget the ranges, and one that was older is over.
- A graph's replay uses what torch calls free: pools that a capture may have taken memory from are never asked.
- It saves work and nothing else: whatever goes wrong here means that more is copied.
"""

import logging

from ebbtide import _core
from ebbtide.saver import detour, leases, pools, program
from ebbtide.saver.names import AS_ALLOCATED_CODE, NO_BACKUP_CODE
from ebbtide.saver.snapshots import Range, Segment, are_apart, free_ranges

_logger = logging.getLogger(__name__)


def find(names: list[str], backup: int) -> tuple[list[Range], int]:
    """The unused ranges of these tags (none: of every tag), sorted and apart, and the lease that they are true as of.

    Args:
        backup: the code of the pause; where nothing is kept, nothing needs to be found.
    """
    backend, own = pools.existing_backend(), program.own()
    if (backend is None and own is None) or backup == NO_BACKUP_CODE or not _core.get_option("skip_unused"):
        return [], 0
    as_of = _core.last_lease()
    chosen = [info for info in _core.tags() if not names or info.tag in names]
    if any(info.lease_count for info in chosen):
        return [], 0
    resident = {info.tag for info in chosen if info.resident_bytes}
    segments: list[Segment] = []

    def is_wanted(tag: str, own_backup: int) -> bool:
        return tag in resident and (backup != AS_ALLOCATED_CODE or own_backup != NO_BACKUP_CODE)

    for key, lent in (*leases.shelf.idle(), *leases.shelf.dissolved()):
        if backend is not None and is_wanted(key.tag, key.backup) and not lent.is_captured:
            segments += look(backend, lent) or ()
    if own is not None and is_wanted(own.tag, own.backup):
        segments += detour.idle_segments()
    ranges = free_ranges(segments)
    return (ranges, as_of) if are_apart(ranges) else ([], 0)


def look(backend: pools.PoolBackend, lent: leases.LentPool) -> list[Segment] | None:
    """The pool's segments; None where that can't be told."""
    try:
        segments = backend.segments(lent.pool)
    except Exception as error:  # what torch tells of itself has no promised shape
        _logger.debug("torch's snapshot of a pool is not understood, so all of it counts as used: %r", error)
        return None
    return None if segments is None else list(segments)
