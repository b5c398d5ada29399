"""What copies need to know of a kind of device."""

from collections.abc import Callable
from typing import Protocol, TypeVar

_T = TypeVar("_T")


class Device(Protocol):
    """A part of `ebbtide.lms.devices.Device`."""

    def allowed_bytes(self) -> int:
        """The limit."""

    def optional(self, make: Callable[[], _T]) -> _T:
        """What `make` allocates belongs to no tag of the program's, and is not on the host."""
