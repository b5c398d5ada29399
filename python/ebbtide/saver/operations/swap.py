"""`saver.swap`: pauses some tags while it resumes others. `saver.hand_over`: the same with two processes."""

from collections.abc import Mapping
from functools import partial

from ebbtide import _core, driver_choice
from ebbtide.processes import handing
from ebbtide.saver.operations.hooked_operation import run
from ebbtide.saver.telling.log_lines import log_report, log_swap
from ebbtide.saver.values.arguments import (
    AS_ALLOCATED,
    BackupByTag,
    OperationBackup,
    Tags,
    check_flag,
    check_leaving,
    check_tags,
    check_timeout,
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


def hand_over(
    *,
    pause: Tags | BackupByTag,
    to: int,
    backup: OperationBackup = AS_ALLOCATED,
    timeout: float = 60.0,
) -> Report:
    """Pauses tags and gives their device memory to a resume of another process, handle by handle as the bytes get out:
    a swap of two processes. Nobody else can take that memory in between.

        saver.hand_over(pause="trainer", to=4712)  # process 4712: saver.resume("engine", timeout=60)

    The regions of both sides say exportable=True. Waits until the other process resumes something of which the device
    memory is away: that call takes this memory, however much is free, and both directions of the bus are used at once.
    Where nothing of the other process is away, since it found room by itself, this is a pause.
    Together they hold at most the larger of the two sides plus 256 MiB (or the largest handle). A handle goes as it is
    where the other side has a chunk of the same size (2 GiB, and what is left of an allocation); any other is released,
    and made anew in the other process. It is overwritten or cleared there before it is resident, unless both processes
    have `configure(clear_handed=False)`.

    If one of the two ends or fails midway, the other's bytes are safe: the pause goes on as a pause, and the resume,
    called again or within its timeout, finishes with what is free.

    Args:
        pause: a tag, a list of tags, or a dict of each to its backup; as in `pause`.
        to: the PID of the other process, as `ebbtide ps` shows it.
        backup: as in `pause`.
        timeout: seconds to wait for its resume.

    Returns:
        The Report of the pause.

    Raises:
        TypeError, ValueError: malformed arguments.
        StateError: no such process shares here; its resume failed, or none came in time; and as in `pause`. Nothing
            moved.
        StoreError, DriverError: as in `pause`.
    """
    leaving = check_leaving([pause] if isinstance(pause, Mapping) else _check_side(pause, "pause"), backup, "hand_over")
    if isinstance(to, bool) or not isinstance(to, int):
        raise TypeError(f"hand_over(to=) takes the PID of a process, not {to!r}")
    seconds = check_timeout(timeout)
    if driver_choice.is_off():
        return Report("pause")

    move = partial(_core.hand_over, backup=leaving.code, backups=leaving.codes)
    call = partial(handing.hand_over, to, seconds, leaving.names, False, move)
    return log_report(Report.from_core(run("pause", call, leaving)), leaving.names)


def _check_side(tags: object, side: str) -> list[str]:
    try:
        return check_tags((tags,))
    except TypeError as error:
        raise TypeError(f"swap({side}=) takes a tag, or a list of tags: {error}") from None
    except ValueError as error:
        if isinstance(tags, str):
            raise
        raise ValueError(f"swap({side}=): {error}") from None
