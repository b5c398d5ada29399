"""`saver.swap`: pauses some tags while it resumes others."""

from collections.abc import Mapping
from functools import partial

from ebbtide import _core, driver_choice
from ebbtide.saver.operations.hooked_operation import run
from ebbtide.saver.telling.log_lines import log_swap
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
    memory within the need of both. The hooks of `on` run as for a pause and a resume. Memory that changes hands is
    cleared first where its new owner had no backup.

    Args:
        pause: a tag, or a list of tags, that leave, or a dict of each of them to its backup; as in `pause`.
        resume: a tag, or a list of tags, that come back; as in `resume`. No tag may be on both sides.
        backup: as in `pause`, for the leaving tags.
        retain: as in `resume`, for the returning tags.
        missing_ok: skip tags that no region ever named.

    Returns:
        A Swap, which holds the Report of either side.

    Raises:
        TypeError, ValueError: malformed arguments; a tag on both sides; no tag on one; a dict beside `backup`.
        StateError: an unknown tag, a tag to pause whose region is open, a capture under way. Nothing moved.
        OutOfMemoryError, StoreError: the device (also after torch's cached memory was given back, as in `resume`) or
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

    call = partial(_core.swap, leaving, returning, missing_ok, kept, backup=moving_out.code, backups=moving_out.codes)
    paused, resumed = run("swap", call, moving_out, returning, missing_ok=missing_ok)
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
