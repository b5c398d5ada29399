"""`saver.prepare`: takes the memory for backups ahead of the pause that needs it, and copies the bytes ahead of it."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn, overload

from ebbtide import driver_choice
from ebbtide.errors import StateError
from ebbtide.saver.copying import paced
from ebbtide.saver.copying.paced import PacedCopy
from ebbtide.saver.operations.hooked_operation import run_alone
from ebbtide.saver.reclaim.look import Look
from ebbtide.saver.telling.log_lines import log_report
from ebbtide.saver.telling.watch import watched
from ebbtide.saver.values.arguments import Tags, check_flag, check_tags
from ebbtide.saver.values.reports import Report


class Preparation:
    """A `prepare` that runs in a thread of its own. The process does not end before its memory is taken; copies end
    with the process.

        copying = saver.prepare("weights", copy=True, wait=False)
        copying.stop()
        print(copying.wait())
    """

    def __init__(
        self, work: Callable[[], Report] | None, copying: PacedCopy | None = None, names: Sequence[str] = ()
    ) -> None:
        self._work = work
        self._names = names
        self._copying = copying
        self._report = Report("prepare")
        self._error: Exception | None = None
        self._process = os.getpid()
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle a Preparation: it runs in a thread of this process")

    @property
    def done(self) -> bool:
        """Whether it is over, successful or not."""
        return self._thread is None or not self._thread.is_alive()

    def stop(self) -> None:
        """Ends the copying of `copy=True` after its present step, mostly within milliseconds; copied blocks stay.
        Taking memory alone can't be stopped.
        """
        if self._copying is not None:
            self._copying.stop()

    def wait(self) -> Report:
        """Waits for the end; the Report, each time.

        Raises:
            StateError, StoreError, DriverError: as in `prepare`; each time.
        """
        if self._thread is not None:
            if os.getpid() != self._process:
                raise StateError("this preparation goes on in the parent of this process, which is a fork: wait there")
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._report

    def _start(self) -> None:
        # Without copies not a daemon, so that the interpreter waits for it before shutting down.
        thread = threading.Thread(target=self._run, name="ebbtide-prepare", daemon=self._copying is not None)
        try:
            if self._copying is None:
                thread.start()
            else:
                self._copying.start(thread)
        except RuntimeError:  # the system starts no thread, or the interpreter is about to end
            self._run()
        else:
            self._thread = thread

    def _run(self) -> None:
        try:
            if self._work is not None:
                self._report = log_report(self._work(), self._names)
        except Exception as error:
            self._error = error


@overload
def prepare(*tags: Tags, copy: bool = False, wait: Literal[True] = True, missing_ok: bool = False) -> Report: ...
@overload
def prepare(*tags: Tags, copy: bool = False, wait: Literal[False], missing_ok: bool = False) -> Preparation: ...
def prepare(*tags: Tags, copy: bool = False, wait: bool = True, missing_ok: bool = False) -> Report | Preparation:
    """Takes the memory (or disk space) that backups of `tags` will need, so that the next pause need not wait for it:
    making host memory takes longer than copying into it. With copy=True it also copies the bytes, so that the next
    pause copies only the blocks that changed since.

    Allocations that have such memory already, have no backup, or are paused are left alone. The memory counts as held
    until the next resume of the tags, or until their tensors are gone.

    Copies are made while the tensors are in use: kernels may read and write them. With wait=False a thread makes them
    in short steps, with rests between them, and the program's own copies go first. A pause or a capture that comes
    meanwhile waits for the present step: some milliseconds, or as long as a whole backup takes to pin, where the step
    begins a pinned one. A pause takes over the copied blocks, and copies the rest. Memory that is freed meanwhile goes
    back at the end of the step; an allocation that needs it waits for that.

    Where a pause or a spill would else be refused for want of host memory, the copies of other tags are given up.
    Blocks of which `backup_of` gave a view are skipped. Where a resume retained a backup, `backup_of` shows blocks that
    are copied anew no longer as of the last pause. `tags()` shows how much is `ahead`.

        saver.prepare("weights", copy=True, wait=False)

    Args:
        tags: tags, or a list of tags; none means every tag.
        copy: whether the bytes are copied as well.
        wait: False returns at once; another thread does the work. Copies then end with the process.
        missing_ok: skip tags that no region ever named.

    Returns:
        A Report: `bytes` is the memory made ready; with copy=True the content of the backups, `copied` of it new. Its
        `note` says where a pause could make no use of copies. With wait=False a Preparation, whose `wait` gives the
        Report.

    Raises:
        TypeError, ValueError: malformed arguments.
        StateError: an unknown tag; with wait=True, a capture under way.
        StoreError: the host (or the disk) has too little room; nothing was taken, or copied blocks stay. With
            wait=False in `wait`.
        DriverError: memory could not be pinned, or a copy failed. With wait=False in `wait`.
    """
    names = check_tags(tags)
    for flag, name in ((copy, "copy"), (missing_ok, "missing_ok"), (wait, "wait")):
        check_flag(flag, name)
    if driver_choice.is_off():
        return Report("prepare") if wait else Preparation(None)
    Look(names).release_dead()
    copying = PacedCopy() if copy and not wait else None
    found = paced.known(names, missing_ok) if copy or not wait else []

    def work() -> Report:
        if not copy:
            return run_alone("prepare", names, missing_ok)
        with watched("prepare", names):
            return paced.copy_now(found) if copying is None else copying.copy(found)

    if wait:
        return log_report(work(), names)
    preparation = Preparation(work, copying, names)
    preparation._start()
    return preparation
