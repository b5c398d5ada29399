"""Large model support for a program that does not know of it: `ebbtide run --lms`."""

import atexit
import multiprocessing
import os
import sys
from multiprocessing.process import BaseProcess
from typing import Any

from ebbtide import settings
from ebbtide.errors import Error
from ebbtide.lms import control
from ebbtide.lms.report import report
from ebbtide.stderr import say

# The modules of targets that prepare data or serve others: workers of a DataLoader, a Pool or an executor, managers.
_HELPERS = ("torch.utils.data", "multiprocessing", "concurrent.futures")


def enable_in_program() -> None:
    """Turns LMS on as the environment says, unless this process is a helper of another.

    Raises:
        SystemExit: it can't be turned on; a message has been printed.
    """
    process = multiprocessing.current_process()
    if "_inheriting" in vars(process) or _is_fork_server():
        _wait_for_target()
    else:
        _enable_for(process)


def _is_fork_server() -> bool:
    """It imports what `multiprocessing.set_forkserver_preload` names, and forks all processes. Those have a parent as
    soon as they run."""
    return multiprocessing.parent_process() is None and any(
        argument.startswith("from multiprocessing.forkserver import main") for argument in sys.orig_argv
    )


def _wait_for_target() -> None:
    """spawn and forkserver import the script, or torch, before they know what the process is to run."""
    plain = BaseProcess._bootstrap  # type: ignore[attr-defined]

    def bootstrap(process: Any, *arguments: Any, **options: Any) -> Any:
        BaseProcess._bootstrap = plain  # type: ignore[attr-defined]
        _enable_for(process)
        return process._bootstrap(*arguments, **options)

    BaseProcess._bootstrap = bootstrap  # type: ignore[attr-defined]


def _enable_for(process: Any) -> None:
    target = vars(process).get("_target")  # the main process has none
    module = f"{getattr(target, '__module__', '')}."
    if not any(module.startswith(f"{helper}.") for helper in _HELPERS):
        _enable()


def _enable() -> None:
    try:
        limit = settings.read("lms", os.environ)
        min_size = settings.read("lms_min_size", os.environ)
        if limit:
            control.enable(
                limit,
                min_size or control.DEFAULT_MIN_SIZE,
                recompute=False if settings.read("lms_recompute", os.environ) == "none" else "auto",
                overflow=settings.read("lms_overflow", os.environ) == "1",
            )
    except (Error, ValueError) as error:
        say(f"large model support can't start, so the program ends: {error}")
        raise SystemExit(1) from None
    if control.is_enabled() and settings.read_or_fallback("summary", os.environ) == "1":
        atexit.register(_print_report, os.getpid())


def _print_report(pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        say(f"large model support\n{report()}")
