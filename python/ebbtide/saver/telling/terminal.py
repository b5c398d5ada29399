"""The program's streams on a terminal, while something is drawn below what the program writes."""

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

    def write(self, text: str) -> int:
        if self._clear is None or not text:
            return int(self.stream.write(text))
        with self._lock:
            self._clear()
            self.is_mid_line = not text.endswith(("\n", "\r"))
            return int(self.stream.write(text))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def forget(self) -> None:
        """From now on only writes. For a forked child, in which nobody draws."""
        self._clear = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


_installed: list[Clearing] = []


def install(clear: Callable[[], None], lock: Any) -> list[Clearing]:
    """Puts a Clearing in the place of stdout and stderr, where each is a terminal."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, Clearing):  # one that somebody kept and put back
            stream = stream.stream
        if is_terminal(stream):
            made = Clearing(stream, clear, lock)
            _installed.append(made)
            setattr(sys, name, made)
    return list(_installed)


def uninstall() -> None:
    """Puts the program's own streams back, where nobody has replaced them since."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream in _installed:
            setattr(sys, name, stream.stream)
    _installed.clear()


def forget() -> None:
    """In a forked child: the streams are the program's own, and what somebody kept only writes."""
    for made in _installed:
        made.forget()
    uninstall()


def is_terminal(stream: Any) -> bool:
    """Whether it is open and a terminal."""
    try:
        return stream is not None and bool(stream.isatty())
    except (AttributeError, ValueError):  # something else stands there, or it is closed
        return False
