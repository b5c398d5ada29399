"""pause and resume: hooks around one call into the core, so that Ctrl-C arrives before or after it, never in it."""

from typing import Any, Literal, overload

from ebbtide import _core, driver_choice
from ebbtide.saver.operations import pending
from ebbtide.saver.operations.hooked_operation import HookedOperation
from ebbtide.saver.operations.pending import Pending
from ebbtide.saver.pools import bypass, captures, workspaces
from ebbtide.saver.reclaim import dead, torch_cache, unused
from ebbtide.saver.state import running_resumes
from ebbtide.saver.tensors.ranges import ranges_of
from ebbtide.saver.values.arguments import AS_ALLOCATED, OperationBackup, check_tags, operation_backup_code, retain_code
from ebbtide.saver.values.reports import Report
from ebbtide.scopes import DecoratingScope


def pause(*tags: str, backup: OperationBackup = AS_ALLOCATED, missing_ok: bool = False) -> Report:
    """Takes the memory of `tags` off the device; addresses stay. Waits for what is queued on their devices.

    Launch nothing that touches the tags until they are resumed. What is paused already is skipped, whatever the
    arguments; the backups of what died since go. Bytes that need not
    move stay where they are (see `configure`): the report counts them.

    Args:
        tags: none means every tag.
        backup: "ram", "pinned", "disk" or None (dropped), this once, for all of them; by default what each region
            said.
        missing_ok: skip tags that no region ever named.

    Returns:
        A Report: `bytes` is the device memory that other programs can use now.

    Raises:
        TypeError, ValueError: malformed arguments.
        StateError: an unknown tag, a tag whose region is open (in whatever thread), a capture under way; a tag that an
            earlier failure left midway while somebody has a view of its backup; for the tag of a pauseable program
            also another thread's open region, or torch before 2.11. Nothing moved.
        StoreError: the host (or the disk) has too little room for the backup; nothing moved. Or the disk failed; every
            byte is safe, as after a DriverError.
        DriverError: a driver call failed; every byte with a backup is safe, and pause or resume, called again,
            finishes.
    """
    return _pause(check_tags(tags), operation_backup_code(backup), missing_ok, None)


def _pause(names: list[str], code: int, missing_ok: bool, moved: "_core.Moved | None") -> Report:
    if driver_choice.is_off():
        return Report("pause")
    clear_workspaces()
    running_resumes.wait_for(names)
    with (
        HookedOperation([("pause", names)], missing_ok),
        bypass.lock_for(names),
        bypass.during_pause(names),
    ):
        dead.release(names)
        ranges, as_of = unused.find(names, code)
        report = _core.pause(names, missing_ok, code, unused=ranges, unused_as_of=as_of, moved=moved)
    return Report.from_core(report)


@overload
def resume(
    *tags: str,
    timeout: float | None = None,
    missing_ok: bool = False,
    retain: bool | None = None,
    wait: Literal[True] = True,
    order: Any = None,
    hold_stream: bool = True,
) -> Report: ...
@overload
def resume(
    *tags: str,
    timeout: float | None = None,
    missing_ok: bool = False,
    retain: bool | None = None,
    wait: Literal[False],
    order: Any = None,
    hold_stream: bool = True,
) -> Pending: ...
def resume(
    *tags: str,
    timeout: float | None = None,
    missing_ok: bool = False,
    retain: bool | None = None,
    wait: bool = True,
    order: Any = None,
    hold_stream: bool = True,
) -> Report | Pending:
    """Brings the memory of `tags` back to the same addresses, with the same bytes (zeros where there was no backup).
    What is resident is skipped, and so is what died while it was paused: no memory is claimed for segments in which
    nothing lives any more, and their backups go.

    Args:
        tags: none means every tag.
        timeout: seconds to keep trying while the device has too little memory (another process may hold it); None
            tries once.
        missing_ok: skip tags that no region ever named.
        retain: True keeps the memory of the backups for the next pause, False gives it back; None does as each region
            said (and keeps what is pinned). What did not change is found only where the region itself retains, or
            is pinned: digests are made for those.
        wait: False returns as soon as everything is mapped and queued, while the bytes are still on their way. On the
            simulated device, whose CPU ops have no stream, it waits all the same; so it does where ebbtide's kernels
            can't be loaded, and on a device that limits how long kernels run.
        order: tensors, or a module, whose bytes come first, in this order; the rest follows in the order of
            allocation.
        hold_stream: only with wait=False. True: this thread's current stream of each device waits for all of the
            bytes, so that what it is given next is right. False: you say what waits, and for what, through the
            Pending.

    Returns:
        A Report: `bytes` is the device memory that was claimed. With wait=False a Pending: errors of the copies and
        "after_resume" hooks come in its `wait()`.

    Raises:
        TypeError, ValueError: malformed arguments.
        StateError: an unknown tag, a capture under way. Nothing moved.
        OutOfMemoryError: the device has too little room, also after torch gave its cached blocks back. Nothing moved;
            the same call works once there is.
        StoreError: the host has too little room for the ring that the bytes go through, or pinned_limit leaves too
            little: nothing moved. Or the disk failed; every byte is safe, as after a DriverError.
        DriverError: as in `pause`. With wait=False, what streams were given meanwhile may have run on bytes that
            had not come.
    """
    names, seconds, code = check_tags(tags), _check_timeout(timeout), retain_code(retain)
    ranges = [] if order is None else [reached for _, reached in ranges_of(order, "resume(order=)")]
    if driver_choice.is_off():
        return Report("resume") if wait else Pending(None)
    with HookedOperation([("resume", names)], missing_ok) as operation:
        dead.release(names)
        free, as_of = unused.find_stored(names)
        if not wait:
            core = torch_cache.claim_with_retries(
                lambda: _core.resume_async(names, missing_ok, code, ranges, free, as_of), seconds
            )
            bypass.close_when_over(names, core)
            return pending.start(core, names, operation, hold_stream)
        report = torch_cache.claim_with_retries(
            lambda: _core.resume(names, missing_ok, retain=code, order=ranges, unused=free, unused_as_of=as_of), seconds
        )
        bypass.close_if_resident(names)
    return Report.from_core(report)


class Paused(DecoratingScope):
    """What `saver.paused` gives. See there."""

    def __init__(self, tags: tuple[str, ...], backup: OperationBackup, missing_ok: bool) -> None:
        self._arguments = tags, backup, missing_ok
        self._moved: _core.Moved | None = None

    def _again(self) -> "Paused":
        return Paused(*self._arguments)

    def _open(self) -> Report:
        tags, backup, missing_ok = self._arguments
        names, code = check_tags(tags), operation_backup_code(backup)
        if not driver_choice.is_off():
            self._moved = _core.Moved()
        return _pause(names, code, missing_ok, self._moved)

    def _close(self) -> Exception | None:
        moved = self._moved
        names = moved.tags() if moved is not None else []
        if not names:
            return None
        try:
            with HookedOperation([("resume", names)], True):
                torch_cache.claim_with_retries(lambda: _core.resume(names, True, moved=moved))
                bypass.close_if_resident(names)
        except Exception as error:
            return error
        return None


def paused(*tags: str, backup: OperationBackup = AS_ALLOCATED, missing_ok: bool = False) -> Paused:
    """Pauses `tags` for the length of a `with`, which gets the Report. Afterwards exactly what it has moved is back:
    what was paused before stays paused, also where that is a part of a tag.

    A context manager and a decorator. Arguments and errors as in `pause`, and at the end as in `resume`.
    """
    return Paused(tags, backup, missing_ok)


def clear_workspaces() -> None:
    """What torch keeps inside tags for itself goes before they do."""
    if not captures.is_capturing():  # where one is, the core refuses, and the capture's workspace is in use
        workspaces.clear()


def _check_timeout(timeout: float | None) -> float:
    if timeout is None:
        return 0.0
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout is a number of seconds or None, not {type(timeout).__name__}")
    if not timeout >= 0:
        raise ValueError(f"timeout must not be negative: {timeout!r}")
    return float(timeout)
