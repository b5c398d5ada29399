"""What copies need to know of a kind of device."""

from contextlib import AbstractContextManager
from typing import Any, Protocol


class Device(Protocol):
    """A part of `ebbtide.lms.devices.Device`."""

    def allowed_bytes(self) -> int:
        """The limit."""

    def optional(self) -> AbstractContextManager[Any]:
        """What is allocated in here belongs to no tag of the program's."""
