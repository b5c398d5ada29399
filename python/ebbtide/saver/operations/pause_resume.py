"""`saver.pause`, `saver.resume` and `saver.paused`."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from ebbtide import _core, driver_choice
from ebbtide.processes import handing, lent
from ebbtide.saver.operations.hooked_operation import HookedOperation, run
from ebbtide.saver.operations.pending import Pending
from ebbtide.saver.telling.log_lines import log_report
from ebbtide.saver.tensors.ranges import ranges_of
from ebbtide.saver.values.arguments import (
    AS_ALLOCATED,
    BackupByTag,
    OperationBackup,
    PauseRequest,
    Tags,
    check_flag,
    check_leaving,
    check_tags,
    check_timeout,
    retain_code,
)
from ebbtide.saver.values.reports import Report
from ebbtide.scopes import DecoratingScope


@overload
def pause(tags: BackupByTag, /, *, missing_ok: bool = False) -> Report: ...
@overload
def pause(*tags: Tags, backup: OperationBackup = AS_ALLOCATED, missing_ok: bool = False) -> Report: ...
def pause(*tags: Tags | BackupByTag, backup: OperationBackup = AS_ALLOCATED, missing_ok: bool = False) -> Report:
    """Takes the memory of `tags` off the device; addresses stay. Waits for queued work on their devices.

        saver.pause("weights")

    Launch nothing that touches the tags until they are resumed. Memory that is already paused is skipped, whatever the
    arguments, and backups of tensors that died since are deleted. A pause skips blocks that are unchanged, free in
    torch's pools, or one repeated value (see `configure`); the report counts them.

    Args:
        tags: tags, or a list of tags; none means every tag. A dict, alone, has a backup for each tag:
            `pause({"weights": "ram", "kv_cache": None})`. It is one operation: all of the tags leave, or none does,
            and tags without a backup go last.
        backup: "ram", "pinned", "disk" or None (the content is dropped), for this pause of all tags. By default,
            the backup of each region.
        missing_ok: skip tags that no region ever named.

    Returns:
        A Report: `bytes` is the device memory that other programs can use now.

    Raises:
        TypeError, ValueError: malformed arguments; a dict without a tag, beside other tags, or beside `backup`.
        StateError: an unknown tag, a tag whose region is open (in whatever thread), a capture under way; a tag that an
            earlier failure left midway while there is a view of its backup; for the tag of a pauseable program
            also another thread's open region. Nothing moved.
        StoreError: the host (or the disk) has too little room for the backup; nothing moved. Or the disk failed; every
            byte is safe, as after a DriverError.
        DriverError: a driver call failed; every byte with a backup is safe, and pause or resume, called again,
            finishes.
    """
    return pause_into(check_leaving(tags, backup, "pause"), missing_ok, None)


def pause_into(leaving: PauseRequest, missing_ok: bool, paused_set: "_core.PausedSet | None") -> Report:
    """A pause that notes in `paused_set` what it moves."""
    check_flag(missing_ok, "missing_ok")
    if driver_choice.is_off():
        return Report("pause")

    call = partial(
        _core.pause, leaving.names, missing_ok, backup=leaving.code, backups=leaving.codes, paused_set=paused_set
    )
    report = run("pause", call, leaving, missing_ok=missing_ok)
    return log_report(Report.from_core(report), leaving.names)


@overload
def resume(
    *tags: Tags,
    timeout: float | None = None,
    missing_ok: bool = False,
    retain: bool | None = None,
    wait: Literal[True] = True,
    order: Any = None,
    hold_stream: bool = True,
) -> Report: ...
@overload
def resume(
    *tags: Tags,
    timeout: float | None = None,
    missing_ok: bool = False,
    retain: bool | None = None,
    wait: Literal[False],
    order: Any = None,
    hold_stream: bool = True,
) -> Pending: ...
def resume(
    *tags: Tags,
    timeout: float | None = None,
    missing_ok: bool = False,
    retain: bool | None = None,
    wait: bool = True,
    order: Any = None,
    hold_stream: bool = True,
) -> Report | Pending:
    """Brings the memory of `tags` back to the same addresses, with the same bytes (zeros where there was no backup).

        saver.resume("weights")

    Resident memory is skipped. So are segments in which every tensor died while the tag was paused: no memory is
    claimed for them, and their backups are deleted. Segments that torch had cached as free before the pause come back,
    as zeros, if there is room for them.

    Args:
        tags: tags, or a list of tags; none means every tag.
        timeout: seconds to keep trying while the device has too little memory (another process may hold it), in turn
            with the processes that share it (`configure(shared=True)`); None tries once.
        missing_ok: skip tags that no region ever named.
        retain: True keeps the memory of the backups for the next pause, False frees it, None follows each region
            (and keeps pinned backups, and all with `copy_ahead` on). Unchanged blocks are found only in regions that
            retain or are pinned, or with `copy_ahead` on, since digests are made for those alone.
        wait: False returns as soon as everything is mapped and queued, while the bytes are still on their way. It
            waits all the same on the simulated device, whose CPU ops have no stream, where ebbtide's kernels can't be
            loaded, and on a device that limits how long kernels run.
        order: tensors, a module, an order of them (`saver.order`), or a list of these: their bytes come first, in this
            order. The rest follows in the order of allocation.
        hold_stream: only with wait=False. True: this thread's current stream of each device waits for all bytes, so
            that later work on it is correct. False: the caller decides what waits, through the Pending.

    Returns:
        A Report: `bytes` is the device memory that was claimed. With wait=False a Pending: errors of the copies and
        "after_resume" hooks come in its `wait()`.

    Raises:
        TypeError, ValueError: malformed arguments.
        StateError: an unknown tag, a capture under way. Nothing moved.
        OutOfMemoryError: the device has too little room, even after everything that torch has cached was given back:
            outside regions, and (from torch 2.9 on) free segments of all tags. No tensor moved; the same call works
            once there is room.
        StoreError: the host has too little room for the ring that the bytes go through, or pinned_limit leaves too
            little: nothing moved. Or the disk failed; every byte is safe, as after a DriverError.
        DriverError: as in `pause`. With wait=False, kernels queued meanwhile may have run on bytes that
            had not come.
    """
    names, seconds, code = check_tags(tags), check_timeout(timeout), retain_code(retain)
    for flag, name in ((missing_ok, "missing_ok"), (wait, "wait"), (hold_stream, "hold_stream")):
        check_flag(flag, name)
    ranges = [] if order is None else [reached for _, reached in ranges_of(order, "resume(order=)")]
    if driver_choice.is_off():
        return Report("resume") if wait else Pending()
    if not wait:
        pending = Pending()
        start = partial(_core.resume_async, names, missing_ok, retain=code, order=ranges)

        def finish(core: "_core.Pending", hooked: HookedOperation | None) -> None:
            pending._follow(core, names, hooked, hold_stream)

        run("resume", start, None, names, missing_ok=missing_ok, seconds=seconds, finish=finish)
        return pending

    bring_back = handing.resume_or_receive if lent.is_listening() else _core.resume
    call = partial(bring_back, names, missing_ok, retain=code, order=ranges)
    try:
        report = run("resume", call, None, names, missing_ok=missing_ok, seconds=seconds)
    except BaseException:
        handing.decline(names)
        raise
    return log_report(Report.from_core(report), names)


def resume_from(paused_set: "_core.PausedSet") -> int:
    """Brings back exactly what `pause_into` noted in it, as far as it is away. Returns the bytes."""
    names = paused_set.tags()
    if not names:
        return 0
    call = partial(_core.resume, names, True, paused_set=paused_set)
    report = run("resume", call, None, names, missing_ok=True, paused_set=paused_set)
    return log_report(Report.from_core(report), names).bytes


class Paused(DecoratingScope):
    """The context manager that `saver.paused` returns."""

    if TYPE_CHECKING:

        def __enter__(self) -> Report: ...

    def __init__(self, tags: "tuple[Tags | BackupByTag, ...]", backup: OperationBackup, missing_ok: bool) -> None:
        # A block may be entered again, and a decorated function called again: a generator gives its tags once.
        kept = tuple(list(each) if isinstance(each, Iterator) else each for each in tags)
        self._arguments: tuple[tuple[Tags | BackupByTag, ...], OperationBackup, bool] = (kept, backup, missing_ok)
        self._paused_set: _core.PausedSet | None = None

    def _again(self) -> "Paused":
        return Paused(*self._arguments)

    def __repr__(self) -> str:
        names = [
            name for tags in self._arguments[0] for name in (tags if isinstance(tags, list | tuple | dict) else [tags])
        ]
        return f"saver.paused({', '.join(map(repr, names))})"

    def _open(self) -> Report:
        tags, backup, missing_ok = self._arguments
        leaving = check_leaving(tags, backup, "paused")
        if not driver_choice.is_off():
            self._paused_set = _core.PausedSet()
        return pause_into(leaving, missing_ok, self._paused_set)

    def _close(self) -> Exception | None:
        try:
            if self._paused_set is not None:
                resume_from(self._paused_set)
        except Exception as error:
            return error
        return None


@overload
def paused(tags: BackupByTag, /, *, missing_ok: bool = False) -> Paused: ...
@overload
def paused(*tags: Tags, backup: OperationBackup = AS_ALLOCATED, missing_ok: bool = False) -> Paused: ...
def paused(*tags: Tags | BackupByTag, backup: OperationBackup = AS_ALLOCATED, missing_ok: bool = False) -> Paused:
    """Pauses `tags` for the length of a `with`, which gets the Report.

        with saver.paused("weights", "kv_cache"):
            train()

    Afterwards exactly the memory that it moved is back. Memory that was paused before stays so, even where it is only
    part of a tag. A context manager and a decorator. Arguments and errors are those of `pause`, and at the end of
    `resume`.
    """
    return Paused(tags, backup, missing_ok)
