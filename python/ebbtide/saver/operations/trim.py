"""`saver.trim`: releases the memory of segments that torch keeps and no tensor uses.

torch frees nothing from a pool that is alive. A wholly free segment keeps its address, and loses its memory until its
pool is leased again. Segments of dissolved pools are freed by torch.
"""

from ebbtide import _core, driver_choice
from ebbtide.processes import member
from ebbtide.saver.pools.pool_segments import free_in, look_at
from ebbtide.saver.pools.region_pools import PoolKey, RegionPool, registry
from ebbtide.saver.reclaim import spilled
from ebbtide.saver.state.known_tags import allocations_of
from ebbtide.saver.telling.log_lines import log_report
from ebbtide.saver.values.arguments import Tags, check_flag, check_tags
from ebbtide.saver.values.reports import Report, ReportRow


def trim(*tags: Tags, missing_ok: bool = False) -> Report:
    """Releases the memory of free segments in the tags' pools: device memory that dead tensors have left behind and, of
    a paused tag, the backups of tensors that died since.

        saver.trim("weights")

    The tags are not paused, but launch nothing on their tensors meanwhile. A segment that shares a driver handle with a
    free one since a resume (configure(shared_handle=)) first gets a handle of its own, by a copy on the device at the
    same address. Without room for the copy, the free segment keeps its memory.

    The memory comes back, as zeros, when a region of the tag is entered again. If it does not fit then, entering raises
    an OutOfMemoryError, unless the region overflows. Until then it stays away, also across a pause and a resume. Pools
    that a CUDA graph captured into are never trimmed.

    Args:
        tags: tags, or a list of tags; none means every tag.
        missing_ok: skip tags that no region ever named.

    Returns:
        A Report: `bytes` is the device memory that other programs can use now, without the backups; nothing where torch
        gives such segments back by itself, or (before 2.9) does not tell which they are.

    Raises:
        TypeError, ValueError: malformed arguments.
        StateError: an unknown tag, a tag whose region is open, a capture under way. Nothing moved.
        DriverError: a driver call failed; trim again finishes. Where memory could not be mapped again, its tag is
            "partial" (`detached_bytes` in `saver.tags()`), and a resume maps it.
    """
    names = check_tags(tags)
    check_flag(missing_ok, "missing_ok")
    if driver_choice.is_off():
        return Report("trim")
    report = trim_quietly(names, missing_ok)
    member.tell()
    return log_report(report, names)


def trim_quietly(names: list[str], missing_ok: bool = False) -> Report:
    """`trim`, for callers inside ebbtide, which hold locks: it logs nothing."""
    chosen = _core.preview("trim", names, missing_ok)
    gone = spilled.release_dissolved(chosen)
    freed = [ReportRow(info.tag, info.device, info.resident_bytes - info.host_bytes) for info in gone]
    with registry.withheld(chosen) as withheld:
        report = _trim(names, withheld)
    return Report.joined(
        "trim", [Report("trim", rows=tuple(row for row in freed if row.bytes)), report], report.seconds
    )


def _trim(names: list[str], withheld: list[tuple[PoolKey, RegionPool]]) -> Report:
    seen = look_at([pool for _, pool in withheld])
    untrimmed = {info.address for info in allocations_of(names) if not info.is_trimmed} if seen else set()
    found = {pool: free_in(segments) & untrimmed for pool, segments in seen.items()}
    found = {pool: addresses for pool, addresses in found.items() if addresses}
    if not found:
        return Report("trim")
    tags = list(dict.fromkeys(key.tag for key, pool in withheld if pool in found))
    return Report.from_core(spilled.trim_pools(tags, found))
