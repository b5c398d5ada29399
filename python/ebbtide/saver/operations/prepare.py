"""`saver.prepare`: takes the memory for backups ahead of the pause that needs it."""

import os
import threading
from typing import Literal, overload

from ebbtide import _core, driver_choice
from ebbtide.errors import StateError
from ebbtide.saver.reclaim import dead
from ebbtide.saver.state.known_tags import check_known
from ebbtide.saver.telling.log_lines import log_report
from ebbtide.saver.telling.watch import Watched
from ebbtide.saver.values.arguments import check_tags
from ebbtide.saver.values.reports import Report


class Preparation:
    """A `prepare` that runs in a thread of its own. The process does not end before it is over."""

    def __init__(self, names: list[str], missing_ok: bool) -> None:
        self._names = names
        self._missing_ok = missing_ok
        self._report = Report("prepare")
        self._error: Exception | None = None
        self._process = os.getpid()
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        """Whether it is over, successful or not."""
        return self._thread is None or not self._thread.is_alive()

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
        # Not a daemon, so that the interpreter waits for it before shutting down.
        thread = threading.Thread(target=self._run, name="ebbtide-prepare", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # the system starts no thread, or the interpreter is about to end
            self._run()
        else:
            self._thread = thread

    def _run(self) -> None:
        try:
            with Watched("prepare", self._names):
                report = _core.prepare(self._names, self._missing_ok)
            self._report = log_report(Report.from_core(report))
        except Exception as error:
            self._error = error


@overload
def prepare(*tags: str, wait: Literal[True] = True, missing_ok: bool = False) -> Report: ...
@overload
def prepare(*tags: str, wait: Literal[False], missing_ok: bool = False) -> Preparation: ...
def prepare(*tags: str, wait: bool = True, missing_ok: bool = False) -> Report | Preparation:
    """Takes the memory (or disk space) that backups of `tags` will need, so that the next pause need not wait for it:
    making host memory takes longer than copying into it.

    Allocations that have such memory already, have no backup, or are paused are left alone. The memory counts as held
    until the next resume of the tags, or until their tensors are gone.

    Args:
        tags: none means every tag.
        wait: False returns at once; another thread does the work.
        missing_ok: skip tags that no region ever named.

    Returns:
        A Report: `bytes` is the memory made ready. With wait=False a Preparation, whose `wait` gives the Report.

    Raises:
        TypeError, ValueError: malformed arguments.
        StateError: an unknown tag, a capture under way.
        StoreError: the host (or the disk) has too little room; nothing was taken. With wait=False in `wait`.
        DriverError: memory could not be pinned. With wait=False in `wait`.
    """
    names = check_tags(tags)
    if driver_choice.is_off():
        return Report("prepare") if wait else Preparation(names, missing_ok)
    dead.release(names)
    if wait:
        with Watched("prepare", names):
            report = _core.prepare(names, missing_ok)
        return log_report(Report.from_core(report))
    if not missing_ok:
        check_known(names)
    preparation = Preparation(names, missing_ok)
    preparation._start()
    return preparation
