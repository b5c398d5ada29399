"""How much ebbtide may hold: `saver.configure` and the variables of the same name."""

import os
import threading
from enum import Enum
from typing import Final, Literal, TypeAlias

from ebbtide import _core, driver_choice
from ebbtide.sizes import parse_size


class _Unchanged(Enum):
    UNCHANGED = "as it is"

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = _Unchanged.UNCHANGED
Limit: TypeAlias = str | int | Literal[_Unchanged.UNCHANGED] | None

_VARIABLES = {
    "device": "EBBTIDE_DEVICE_LIMIT",
    "host": "EBBTIDE_HOST_LIMIT",
    "host_margin": "EBBTIDE_HOST_MARGIN",
}
_lock = threading.Lock()
_environment_is_applied = False


def configure(
    *, device_limit: Limit = UNCHANGED, host_limit: Limit = UNCHANGED, host_margin: Limit = UNCHANGED
) -> None:
    """Sets limits; what is left out stays as it is. All are checked before any is set.

    Args:
        device_limit: the most that ebbtide may hold on each device ("16GiB" or bytes); None: no limit.
        host_limit: the most host memory that it may hold; None: no limit but RAM and the container's.
        host_margin: host memory that it leaves to others ("1GiB" or bytes).

    Raises:
        TypeError, ValueError: malformed sizes.
    """
    if host_margin is None:
        raise TypeError("host_margin is a size: 0 leaves nothing to others")
    given = {"device_limit": device_limit, "host_limit": host_limit, "host_margin": host_margin}
    limits = {
        argument: _core.UNLIMITED if size is None else parse_size(size, argument)
        for argument, size in given.items()
        if not isinstance(size, _Unchanged)
    }
    if driver_choice.is_off():
        return
    apply_environment()
    for argument, value in limits.items():
        _core.set_limit(argument.removesuffix("_limit"), value)


def apply_environment() -> None:
    """Sets what EBBTIDE_DEVICE_LIMIT, EBBTIDE_HOST_LIMIT and EBBTIDE_HOST_MARGIN say, at the first call.

    Raises:
        ValueError: one of them is no size.
    """
    global _environment_is_applied
    with _lock:
        if _environment_is_applied:
            return
        sizes = {
            name: parse_size(os.environ[variable], variable)
            for name, variable in _VARIABLES.items()
            if os.environ.get(variable)
        }
        for name, value in sizes.items():
            _core.set_limit(name, value)
        _environment_is_applied = True
