"""The errors of ebbtide. All of them can be pickled, also between a process that has torch and one that has not.

An `OutOfMemoryError` that is made after torch was imported is a `torch.OutOfMemoryError`, so that a program's `except
torch.OutOfMemoryError` catches it. Neither package imports the other for that.
"""

import sys
from typing import Any

from ebbtide.locks import make_lock

UNLIMITED = 2**64 - 1


LENT = 11  # the ebbtide_cause of memory that can't leave since other processes use it

# Between the core's message and _ADVICE.
_IN_PYTHON = ". In Python: "

# By ebbtide_cause: the options of Python, which the core's message does not name.
_ADVICE = {
    1: 'backup="disk", backup=None, saver.trim(), saver.configure(host_limit=..., host_margin=...)',
    2: 'backup="ram", saver.configure(pinned_limit=...)',
    3: 'backup="ram"',
    4: 'saver.configure(disk_directory=...), backup="ram"',
    5: "saver.pause(...), saver.resume(..., timeout=...)",
    6: "saver.pause(...), saver.configure(device_limit=...)",
    7: "saver.pause(...), saver.configure(device_margin=...), torch_memory_saver.memory_margin_bytes",
    8: "saver.backup_of gave the view",
    9: "ebbtide.lms.limit = ...",
    10: 'backup="disk", backup=None, saver.trim(), ebbtide.lms.enable(host_limit=...)',
    LENT: "saver.attach(..., pauseable=True) in that process",
}


def advise(message: str, cause: int) -> str:
    """The core's message for Python.

    Args:
        message: the core's, without Python's syntax.
        cause: the `ebbtide_cause` of csrc/api/ebbtide.h.

    Returns:
        The message, with the options of Python against this cause. Example: advise("the disk is full", 4)
    """
    advice = _ADVICE.get(cause)
    return message if advice is None else message + _IN_PYTHON + advice


def has_cause(error: BaseException, cause: int) -> bool:
    """Whether the core refused for this `ebbtide_cause`."""
    return getattr(error, "_cause", 0) == cause


def neutral(error: Exception) -> str:
    """The message without the part that `advise` added: for readers that write no Python."""
    return str(error).partition(_IN_PYTHON)[0]


class Error(Exception):
    """The base of the errors of ebbtide, besides ValueError and TypeError for malformed arguments.

    For example:

        try:
            saver.pause("weights", "no such tag")
        except ebbtide.Error as error:
            print(error)
    """

    _fields: tuple[str, ...] = ()
    _cause = 0  # the ebbtide_cause that the core gave

    def __init__(self, message: str = "") -> None:
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        # By name and values: the class that reads this back may have other bases than the one that wrote it.
        state = {name: value for name, value in self.__dict__.items() if name not in self._fields}
        arguments = (self.args[0] if self.args else "", *(getattr(self, name) for name in self._fields))
        return (type(self), arguments, state or None)


class StateError(Error):
    """The call does not fit the state of things: an unknown or leased tag, a capture under way, a forked child.

    For example:

        try:
            saver.pause("no such tag")
        except ebbtide.StateError as error:
            print(error)
    """


class _MemoryError(Error):
    """The base of the two errors about missing memory; sizes in bytes, `limit_bytes` None where no limit is set."""

    _fields: tuple[str, ...] = ("requested_bytes", "free_bytes", "limit_bytes")

    def __init__(
        self, message: str = "", requested_bytes: int = 0, free_bytes: int = 0, limit_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes
        self.limit_bytes = None if limit_bytes is None or limit_bytes >= UNLIMITED else limit_bytes


class StoreError(_MemoryError):
    """The host has too little room for a backup, or a store failed. Nothing that was backed up is lost.

        try:
            saver.pause("weights")
        except ebbtide.StoreError as error:
            saver.pause("weights", backup="disk")

    Attributes: requested_bytes, free_bytes, limit_bytes (None: no limit is set).
    """


class OutOfMemoryError(_MemoryError):
    """The device has too little memory, or `device_limit` does not allow it; nothing moved, and the same call works
    once there is room.

        try:
            saver.resume("weights")
        except ebbtide.OutOfMemoryError as error:
            print(error)

    Attributes: requested_bytes, free_bytes, limit_bytes (None: no limit is set), device (CUDA ordinal, -1 where
    unknown). Also a `torch.OutOfMemoryError` where torch has been imported.
    """

    _fields = ("requested_bytes", "free_bytes", "limit_bytes", "device")

    def __init__(
        self,
        message: str = "",
        requested_bytes: int = 0,
        free_bytes: int = 0,
        limit_bytes: int | None = None,
        device: int = -1,
    ) -> None:
        _join_torch()
        super().__init__(message, requested_bytes, free_bytes, limit_bytes)
        self.device = device


class DriverError(Error):
    """A driver call failed in a way that is not out of memory.

        try:
            saver.pause("weights")
        except ebbtide.DriverError as error:
            print(error)

    Attributes: call ("cuMemMap"), code (the CUresult), arguments (the call's, as text).
    """

    _fields = ("call", "code", "arguments")

    def __init__(self, message: str = "", call: str = "", code: int = 0, arguments: str = "") -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.arguments = arguments


_join_lock = make_lock()


def _join_torch() -> None:
    """Adds torch's class to the bases of ours, once, if torch is there."""
    torch_class = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    if not isinstance(torch_class, type):
        return
    with _join_lock:
        if not issubclass(OutOfMemoryError, torch_class):
            OutOfMemoryError.__bases__ = (*OutOfMemoryError.__bases__, torch_class)


_join_torch()
