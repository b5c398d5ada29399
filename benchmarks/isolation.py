"""A function in a fresh process: the first pause of a process is not like the second.

The processes are forked from a server that has imported torch and nothing more: no driver, no ebbtide, no threads. So
each is fresh where it matters, and none spends seconds on importing torch.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from benchmarks.measured import SkippedError

LAST_WORDS = 600
PR_SET_PDEATHSIG = 1  # of Linux's prctl

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch"])


def start() -> None:
    """Lets the server import torch while this process does something else."""
    forkserver.ensure_running()


def run(function: Callable[[], dict[str, Any]], environment: Mapping[str, str], timeout: float) -> dict[str, Any]:
    """Its result with `status`: "ok", or "skipped" or "failed" with a `reason`. Never raises for what happens there.

    What it gives must be plain values that JSON takes. A process that ends badly after its result was written has
    `exit_status` beside it.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = _context.Process(target=_serve, args=(function, dict(environment), folder))
        process.start()
        try:
            process.join(timeout)
            is_late = process.is_alive()
        finally:  # also where a signal ends the waiting
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # too early for `_serve`
                    os.killpg(process.pid, signal.SIGKILL)  # with what it has started
            process.kill()
            process.join()
        status = process.exitcode
        file = Path(folder, "result.json")
        if file.exists():
            result = json.loads(file.read_text())
            return result if status == 0 else {**result, "exit_status": status}
        log = Path(folder, "log.txt")
        last_words = log.read_text(errors="replace")[-LAST_WORDS:].strip() if log.exists() else ""
    end = f"took longer than {timeout:g} s" if is_late else describe_exit(status)
    return {"status": "failed", "reason": f"{end}; its last words: {last_words or 'none'}"}


def describe_error(error: Exception) -> str:
    """With the file's name and the line, and no folder of this machine."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


def describe_exit(status: int | None) -> str:
    if status is not None and status < 0:
        return f"ended by {signal.Signals(-status).name} before it had a result"
    return f"ended with status {status} before it had a result"


def _serve(function: Callable[[], dict[str, Any]], environment: dict[str, str], folder: str) -> None:
    """Runs in the fresh process. The result is written first: a library may abort at exit."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the server ends with its parent
    os.environ.update(environment)
    log = os.open(Path(folder, "log.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        result = {"status": "ok", **function()}
    except SkippedError as reason:
        result = {"status": "skipped", "reason": str(reason)}
    except Exception as error:
        traceback.print_exc()
        result = {"status": "failed", "reason": describe_error(error)}
    part = Path(folder, "result.part")
    part.write_text(json.dumps(result))
    part.rename(Path(folder, "result.json"))
