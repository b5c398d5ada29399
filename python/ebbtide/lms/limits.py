"""Limits of ebbtide that LMS holds lower for a while."""

from ebbtide import _core
from ebbtide.saver.operations.configuration import configure


class BorrowedLimit:
    """One limit, "device" or "host", in bytes. It is never above the one that the user set, who has the last word."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._before = _core.UNLIMITED
        self._made: int | None = None  # what `set` made of it

    def set(self, wanted: int | None) -> None:
        """None: as it was before the first `set`."""
        if wanted is None:
            self.restore()
            return
        if (current := _core.get_limit(self._kind)) != self._made:
            self._before = current  # the user's
        self._made = min(wanted, self._before)  # first: an interrupt in between must not leave a limit nobody ends
        if self._made != current:
            self._configure(self._made)

    def restore(self) -> None:
        """As it was before the first `set`, unless the user has changed it since."""
        if self._made is not None and _core.get_limit(self._kind) == self._made:
            self._configure(None if self._before == _core.UNLIMITED else self._before)
        self._made = None

    def _configure(self, value: int | None) -> None:
        configure(**{f"{self._kind}_limit": value})  # type: ignore[arg-type]
