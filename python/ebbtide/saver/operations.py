"""pause and resume: hooks around one call into the core, so that Ctrl-C arrives before or after it, never in it."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from ebbtide import _core, driver_choice
from ebbtide.errors import OutOfMemoryError
from ebbtide.saver import captures, hooks, workspaces
from ebbtide.saver.names import AS_ALLOCATED, OperationBackup, check_tags, operation_backup_code
from ebbtide.saver.regions import disabled
from ebbtide.saver.reports import Report

Kind = Literal["pause", "resume"]

_FIRST_WAIT_SECONDS = 0.01
_LONGEST_WAIT_SECONDS = 0.25


def pause(*tags: str, backup: OperationBackup = AS_ALLOCATED, missing_ok: bool = False) -> Report:
    """Takes the memory of `tags` off the device; addresses stay. Waits for what is queued on their devices.

    Launch nothing that touches the tags until they are resumed. What is paused already is skipped.

    Args:
        tags: none means every tag.
        backup: "ram" or None (dropped), this once, for all of them; by default what each region said.
        missing_ok: skip tags that no region ever named.

    Returns:
        A Report: `bytes` is the device memory that other programs can use now.

    Raises:
        TypeError, ValueError: malformed arguments.
        StateError: an unknown tag, a tag whose region is open (in whatever thread), a capture under way. Nothing
            moved.
        StoreError: the host has too little room for the backup. Nothing moved.
        DriverError: a driver call failed; every byte with a backup is safe, and pause or resume, called again,
            finishes.
    """
    names, code = check_tags(tags), operation_backup_code(backup)
    if driver_choice.is_off():
        return Report("pause")
    if not captures.is_capturing():  # where one is, the core refuses, and the capture's workspace is in use
        workspaces.forget()
    return _with_hooks("pause", names, missing_ok, lambda: _core.pause(names, missing_ok, code))


def resume(*tags: str, timeout: float | None = None, missing_ok: bool = False) -> Report:
    """Brings the memory of `tags` back to the same addresses, with the same bytes (zeros where there was no backup).
    What is resident is skipped.

    Args:
        tags: none means every tag.
        timeout: seconds to keep trying while the device has too little memory (another process may hold it); None
            tries once.
        missing_ok: skip tags that no region ever named.

    Returns:
        A Report: `bytes` is the device memory that was claimed.

    Raises:
        TypeError, ValueError: malformed arguments.
        StateError: an unknown tag, a capture under way. Nothing moved.
        OutOfMemoryError: the device has too little room, also after torch gave its cached blocks back. Nothing moved;
            the same call works once there is.
        DriverError: as in `pause`.
    """
    names, seconds = check_tags(tags), _check_timeout(timeout)
    if driver_choice.is_off():
        return Report("resume")
    return _with_hooks("resume", names, missing_ok, lambda: _resume_patiently(names, missing_ok, seconds))


@contextmanager
def paused(*tags: str, backup: OperationBackup = AS_ALLOCATED, missing_ok: bool = False) -> Iterator[Report]:
    """Pauses `tags` for the length of a `with`, which gets the Report. What was paused before stays paused after it.

    Arguments and errors as in `pause`, and at the end as in `resume`.
    """
    names = check_tags(tags)
    resident = set() if driver_choice.is_off() else _resident_tags(names)
    try:
        yield pause(*tags, backup=backup, missing_ok=missing_ok)
    finally:  # also where Ctrl-C or a hook came right after the pause
        moved = resident - _resident_tags(names) if resident else set()
        if moved:
            resume(*moved)


def _resident_tags(names: list[str]) -> set[str]:
    """Those of `names` (none: all) that hold something and have nothing away."""
    return {info.tag for info in _core.tags() if info.state == "resident" and (not names or info.tag in names)}


def _check_timeout(timeout: float | None) -> float:
    if timeout is None:
        return 0.0
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout is a number of seconds or None, not {type(timeout).__name__}")
    if not timeout >= 0:
        raise ValueError(f"timeout must not be negative: {timeout!r}")
    return float(timeout)


def _resume_patiently(names: list[str], missing_ok: bool, seconds: float) -> "_core.Report":
    deadline = time.monotonic() + seconds
    wait = _FIRST_WAIT_SECONDS
    try:
        return _core.resume(names, missing_ok)
    except OutOfMemoryError:
        if not _empty_torch_cache() and seconds == 0:
            raise
    while True:
        try:
            return _core.resume(names, missing_ok)
        except OutOfMemoryError:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
        time.sleep(min(wait, left))
        wait = min(2 * wait, _LONGEST_WAIT_SECONDS)


def _empty_torch_cache() -> bool:
    """Gives back what torch has cached outside regions; whether torch uses CUDA at all."""
    torch = sys.modules.get("torch")
    if torch is None or torch.version.cuda is None or not torch.cuda.is_initialized() or captures.is_capturing():
        return False
    with disabled():  # while a pool is open, torch empties that one only
        torch.cuda.empty_cache()
    return True


def _with_hooks(kind: Kind, names: list[str], missing_ok: bool, operate: "Callable[[], _core.Report]") -> Report:
    before, after = f"before_{kind}", f"after_{kind}"
    concerned = _concerned_tags(kind, names, missing_ok) if hooks.wants((before, after)) else []
    hooks.run_before(before, concerned)
    report = Report.from_core(operate())
    hooks.run_after(after, concerned)
    return report


def _concerned_tags(kind: Kind, names: list[str], missing_ok: bool) -> list[str]:
    """The tags with something to move; none where the core will refuse."""
    known = {info.tag: info for info in _core.tags()}
    chosen = [known[name] for name in names if name in known] if names else list(known.values())
    is_unknown = len(chosen) < len(names) and not missing_ok
    is_leased = kind == "pause" and any(info.lease_count for info in chosen)
    if is_unknown or is_leased or captures.is_capturing():
        return []
    if kind == "pause":
        return [info.tag for info in chosen if info.resident_bytes]
    return [info.tag for info in chosen if info.stored_bytes or info.dropped_bytes]
