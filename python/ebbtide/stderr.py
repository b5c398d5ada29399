"""Lines for the user on stderr, whether or not the core is loaded."""

import contextlib
import os
import signal
import sys

from ebbtide.locks import writing


def say(text: str) -> None:
    """Writes "ebbtide: <text>" to stderr. A line that stderr does not take is lost, and neither fails the call nor ends
    the process.
    """
    with contextlib.suppress(Exception):  # full, without a reader, closed, or an object of the program's own
        stream = sys.stderr
        if stream is None:
            return
        is_the_systems = stream is sys.__stderr__
        if not is_the_systems:
            with writing:
                print(f"ebbtide: {text}", file=stream, flush=True)
            return
        # Past its buffer: a line that is left there would fail the end of the process. No lock is held meanwhile, which
        # a forked child would find taken.
        stream.flush()
        _write(stream.fileno(), f"ebbtide: {text}\n".encode(errors="backslashreplace"))


def _write(file: int, line: bytes) -> None:
    """As os.write, but without a reader no SIGPIPE ends a process that has its default again."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        is_pending = signal.SIGPIPE in signal.sigpending()
        try:
            os.write(file, line)
        except BrokenPipeError:
            if not is_pending:
                signal.sigtimedwait({signal.SIGPIPE}, 0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
