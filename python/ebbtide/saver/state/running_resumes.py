"""The resumes that are under way: those of `saver.resume(wait=False)`.

The core waits for a resume when its last handle is dropped. A handle to each is kept here until the resume is over, so
that dropping a `Pending` blocks nobody, and the process ends after them all.
"""

import atexit
import contextlib

from ebbtide import _core
from ebbtide.errors import Error
from ebbtide.locks import make_lock

_lock = make_lock()
_running: "dict[_core.Pending, frozenset[str]]" = {}  # with their tags; none: all


def keep(resume: "_core.Pending", names: list[str]) -> None:
    """Keeps the resume of these tags (none: all) until it is over."""
    with _lock:
        for other in [other for other in _running if other.is_over()]:
            del _running[other]
        _running[resume] = frozenset(names)


def wait_for(names: list[str]) -> None:
    """Waits for the running resumes of these tags (none: all), as a pause of them would.

    Afterwards it is known what the pause moves, and which hooks run.
    """
    with _lock:
        concerned = [resume for resume, its in _running.items() if not names or not its or not its.isdisjoint(names)]
    for resume in concerned:
        wait_quietly(resume)


def wait_for_all() -> None:
    """Waits for every running resume."""
    with _lock:
        waiting = list(_running)
    for resume in waiting:
        wait_quietly(resume)


def wait_quietly(resume: "_core.Pending") -> None:
    """Waits for the end of a resume. Its error is left to `Pending.wait`, which raises it each time."""
    with contextlib.suppress(Error):
        resume.wait()


def is_arriving(address: int, size_bytes: int) -> bool:
    """Whether a running resume brings these bytes, or has brought them by now."""
    with _lock:
        waiting = list(_running)
    return any(not each.is_ready(address, size_bytes) for each in waiting) or not _core.is_away(address, size_bytes)


atexit.register(wait_for_all)
