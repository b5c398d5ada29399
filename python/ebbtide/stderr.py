"""What ebbtide tells a user on stderr, beside its logger and whether or not its core is loaded."""

import contextlib
import os
import sys


def say(text: str) -> None:
    """Writes "ebbtide: <text>" to stderr, where that takes it: what is said about a call never fails it, and is never
    said on stdout."""
    with contextlib.suppress(OSError, ValueError):  # full, without a reader, or closed
        stream = sys.stderr
        if stream is None:
            return
        is_the_systems = stream is sys.__stderr__
        if not is_the_systems:
            print(f"ebbtide: {text}", file=stream, flush=True)
            return
        # Past its buffer, which would keep what could not be written, and fail the end of the process by it.
        stream.flush()
        os.write(stream.fileno(), f"ebbtide: {text}\n".encode(errors="backslashreplace"))
