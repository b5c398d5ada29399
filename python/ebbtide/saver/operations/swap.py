"""`saver.swap`: pauses some tags while it resumes others."""

from collections.abc import Mapping

from ebbtide import _core, driver_choice
from ebbtide.saver.check import enabling
from ebbtide.saver.copying import keeper
from ebbtide.saver.operations.hooked_operation import Action, hooked
from ebbtide.saver.operations.pause_resume import clear_workspaces
from ebbtide.saver.pools import bypass
from ebbtide.saver.pools.pool_segments import Look
from ebbtide.saver.reclaim import dead, torch_cache, unused
from ebbtide.saver.telling.log_lines import log_swap
from ebbtide.saver.telling.watch import watched
from ebbtide.saver.values.arguments import (
    AS_ALLOCATED,
    BackupByTag,
    OperationBackup,
    Tags,
    check_flag,
    check_leaving,
    check_tags,
    retain_code,
)
from ebbtide.saver.values.reports import Report, Swap


def swap(
    *,
    pause: Tags | BackupByTag,
    resume: Tags,
    backup: OperationBackup = AS_ALLOCATED,
    retain: bool | None = None,
    missing_ok: bool = False,
) -> Swap:
    """Pauses some tags and resumes others, with both directions of the bus at once.

        saver.swap(pause="weights", resume="kv_cache")

    Device memory stays within the larger of the two sides plus 256 MiB (or the largest chunk that comes back), host
    memory within what both need. The hooks of `on` run as for a pause and a resume. Memory that changes hands is
    cleared first where its new owner had no backup.

    Args:
        pause: a tag, or a list of tags, that leave, or a dict of each of them to its backup; as in `pause`.
        resume: a tag, or a list of tags, that come back; as in `resume`. No tag may be on both sides.
        backup: as in `pause`, for what leaves.
        retain: as in `resume`, for what comes back.
        missing_ok: skip tags that no region ever named.

    Returns:
        A Swap, which holds the Report of either side.

    Raises:
        TypeError, ValueError: malformed arguments; a tag on both sides; no tag on one; a dict beside `backup`.
        StateError: an unknown tag, a tag to pause whose region is open, a capture under way. Nothing moved.
        OutOfMemoryError, StoreError: the device (also after what torch has cached was given back, as in `resume`) or
            the host has too little room. Nothing moved, unless another program took the room midway: then as after a
            DriverError.
        DriverError: a driver call failed; every byte with a backup is safe, and pause or resume of either side
            finishes.
    """
    moving_out = check_leaving([pause] if isinstance(pause, Mapping) else _check_side(pause, "pause"), backup, "swap")
    leaving, returning = moving_out.names, _check_side(resume, "resume")
    both = [tag for tag in leaving if tag in returning]
    if both:
        raise ValueError(f"{both[0]!r} can't leave and come back in one swap: name it on one side")
    kept = retain_code(retain)
    check_flag(missing_ok, "missing_ok")
    if driver_choice.is_off():
        return Swap(Report("pause"), Report("resume"))
    clear_workspaces()
    moving: list[Action] = [("pause", leaving), ("resume", returning)]
    shared = bypass.shared_tags(leaving)
    with hooked(moving, missing_ok, asks_first=bool(shared)), bypass.lock_for(shared), bypass.during_pause(shared):
        enabling.look_before_pause(leaving)
        look = Look([*leaving, *returning])
        dead.release(look)
        ranges, as_of = unused.find_for_swap(moving_out, returning, look)
        with watched("swap", leaving, returning):
            paused, resumed = torch_cache.claim_with_retries(
                lambda: _core.swap(
                    leaving,
                    returning,
                    missing_ok,
                    moving_out.code,
                    kept,
                    unused=ranges,
                    unused_as_of=as_of,
                    backups=moving_out.codes,
                ),
                make_room=lambda: dead.make_room(returning),
            )
        bypass.close_if_resident(returning)
    keeper.keep_if_wanted(returning)
    swapped = Swap(Report.from_core(paused), Report.from_core(resumed), max(paused.seconds, resumed.seconds))
    return log_swap(swapped, leaving, returning)


def _check_side(tags: object, side: str) -> list[str]:
    try:
        return check_tags((tags,))
    except TypeError as error:
        raise TypeError(f"swap({side}=) takes a tag, or a list of tags: {error}") from None
    except ValueError as error:
        if isinstance(tags, str):
            raise
        raise ValueError(f"swap({side}=): {error}") from None
