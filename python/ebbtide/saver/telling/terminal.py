"""The program's streams on a terminal, while something is drawn below what the program writes."""

import contextlib
import sys
from collections.abc import Callable, Iterable
from typing import Any


class Clearing:
    """Stands for a stream on a terminal, and clears what is drawn there before each write.

    Args:
        stream: the program's.
        clear: is called with `lock` held.
        lock: whoever draws holds it meanwhile.
    """

    def __init__(self, stream: Any, clear: Callable[[], None], lock: Any) -> None:
        self.stream = stream
        self.is_mid_line = False  # whoever draws would write into the program's line
        self._clear: Callable[[], None] | None = clear
        self._lock = lock

    def write(self, text: str) -> Any:
        if self._clear is None or not text:
            return self.stream.write(text)
        with self._lock:
            with contextlib.suppress(Exception):  # of the drawing, which may be on another stream
                if self._clear is not None:
                    self._clear()
            self.is_mid_line = not text.endswith(("\n", "\r"))
            return self.stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def forget(self) -> None:
        """From now on only writes, for whoever has kept it."""
        self._clear = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __enter__(self) -> Any:
        return self.stream.__enter__()

    def __exit__(self, *error: object) -> Any:
        return self.stream.__exit__(*error)

    def __iter__(self) -> Any:
        return iter(self.stream)


_installed: list[Clearing] = []


def install(clear: Callable[[], None], lock: Any) -> list[Clearing]:
    """Puts a Clearing in the place of stdout and stderr, where each is a terminal."""
    for name in ("stdout", "stderr"):
        found = getattr(sys, name)
        stream = own(found)
        if is_terminal(stream) and getattr(sys, name) is found:  # else another thread has replaced it since
            made = Clearing(stream, clear, lock)
            _installed.append(made)
            setattr(sys, name, made)
    return list(_installed)


def uninstall() -> None:
    """Puts the program's own streams back, where nobody has replaced them since."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if any(stream is made for made in _installed):
            setattr(sys, name, stream.stream)
    for made in _installed:
        made.forget()
    _installed.clear()


def own(stream: Any) -> Any:
    """The program's stream behind what stands for it, which somebody may have kept and put back."""
    return stream.stream if isinstance(stream, Clearing) else stream


def is_terminal(stream: Any) -> bool:
    """Whether it is open and a terminal."""
    try:
        return stream is not None and bool(stream.isatty())
    except (AttributeError, ValueError):  # something else stands there, or it is closed
        return False
