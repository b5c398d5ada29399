"""How much ebbtide may hold and what a pause may leave out: `saver.configure` and the variables of the same names."""

import os
import threading
from enum import Enum
from typing import Final, Literal, TypeAlias

from ebbtide import _core, driver_choice
from ebbtide.sizes import format_size, parse_size


class _Unchanged(Enum):
    UNCHANGED = "as it is"

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = _Unchanged.UNCHANGED
Limit: TypeAlias = str | int | Literal[_Unchanged.UNCHANGED] | None
Fraction: TypeAlias = float | Literal[_Unchanged.UNCHANGED]
Switch: TypeAlias = bool | Literal[_Unchanged.UNCHANGED]
Folder: TypeAlias = str | os.PathLike[str] | Literal[_Unchanged.UNCHANGED] | None

_SIZE_VARIABLES = {
    "device": "EBBTIDE_DEVICE_LIMIT",
    "host": "EBBTIDE_HOST_LIMIT",
    "host_margin": "EBBTIDE_HOST_MARGIN",
    "pinned": "EBBTIDE_PINNED_LIMIT",
    "reserve": "EBBTIDE_RESERVE",
    "host_pool": "EBBTIDE_HOST_POOL",
    "shared_handle": "EBBTIDE_SHARED_HANDLE",
}
_MEANINGS_OF_0 = {
    "host_margin": "leaves nothing to others",
    "host_pool": "keeps nothing",
    "shared_handle": "lets no segments share one",
}
_FRACTION_VARIABLE = "EBBTIDE_WHOLE_FRACTION"
_SIZES_BY_NAME = ("host_margin", "reserve", "host_pool", "shared_handle")  # the others are called NAME_limit
_SWITCH_VARIABLES = {
    "skip_clean": "EBBTIDE_SKIP_CLEAN",
    "skip_unused": "EBBTIDE_SKIP_UNUSED",
    "skip_constant": "EBBTIDE_SKIP_CONSTANT",
    "compare_bytes": "EBBTIDE_COMPARE_BYTES",
}
_lock = threading.Lock()
_environment_is_applied = False


def configure(
    *,
    device_limit: Limit = UNCHANGED,
    host_limit: Limit = UNCHANGED,
    host_margin: Limit = UNCHANGED,
    pinned_limit: Limit = UNCHANGED,
    reserve: Limit = UNCHANGED,
    host_pool: Limit = UNCHANGED,
    shared_handle: Limit = UNCHANGED,
    whole_fraction: Fraction = UNCHANGED,
    disk_directory: Folder = UNCHANGED,
    skip_clean: Switch = UNCHANGED,
    skip_unused: Switch = UNCHANGED,
    skip_constant: Switch = UNCHANGED,
    compare_bytes: Switch = UNCHANGED,
) -> None:
    """Sets limits and switches; what is left out stays as it is. All are checked before any is set.

    Args:
        device_limit: the most that ebbtide may hold on each device ("16GiB" or bytes); None: no limit.
        host_limit: the most host memory that it may hold; None: no limit but RAM and the container's.
        host_margin: host memory that it leaves to others ("1GiB" or bytes).
        pinned_limit: the most pinned memory that it may hold, for its rings and for pinned backups; None: no limit.
        reserve: device memory that spills and promotions leave free, on each device; None: 512 MiB, or a sixteenth of
            the device where that is less. Allocations of up to 2 MiB may use half of it, and of device_limit what large
            ones that may spill leave to them: a 32nd, at most 64 MiB and half the reserve.
        host_pool: host memory that is made ahead and kept for spills, which otherwise wait for it; 0 keeps none. Where
            a backup or a spill finds no room beside it, it gives way.
        shared_handle: segments of a tag that lie side by side come back behind one driver handle of at most this size,
            which makes the next resumes and pauses faster; what dies of them gives its memory back when all of them do,
            or at the next pause. 0: each segment keeps handles of its own.
        whole_fraction: overflow="whole": the share of the free device memory, 0 to 1, above which an allocation lies on
            the host.
        disk_directory: the folder of disk backups that are made from now on; None: EBBTIDE_DISK_DIRECTORY, else TMPDIR,
            else /var/tmp. It is looked at when a backup is made.
        skip_clean: whether a pause leaves out blocks of 2 MiB that did not change since their backup was made, by a
            seeded digest of 128 bits. A change within 16 bytes is always seen; that another one is missed has odds of
            about 2**-128 (an estimate, not a proof).
        skip_unused: whether it leaves out blocks that torch holds free. Their content is gone then.
        skip_constant: whether it keeps blocks of one repeated value of 16 bytes as that value.
        compare_bytes: whether, where a digest says that nothing changed, the bytes are copied and compared all the
            same. Pinned backups are simply written again.

    Raises:
        TypeError, ValueError: malformed sizes, switches that are no bool, a host_pool beyond the machine's RAM.
        StoreError: the host has too little for host_pool. All is set, and what was made stays.
    """
    given = {
        "device": device_limit,
        "host": host_limit,
        "host_margin": host_margin,
        "pinned": pinned_limit,
        "reserve": reserve,
        "host_pool": host_pool,
        "shared_handle": shared_handle,
    }
    for name, meaning in _MEANINGS_OF_0.items():
        if given[name] is None:
            raise TypeError(f"{name} is a size: 0 {meaning}")
    limits = {
        name: _core.UNLIMITED if size is None else parse_size(size, name if name in _SIZES_BY_NAME else f"{name}_limit")
        for name, size in given.items()
        if not isinstance(size, _Unchanged)
    }
    switches = {
        "skip_clean": skip_clean,
        "skip_unused": skip_unused,
        "skip_constant": skip_constant,
        "compare_bytes": compare_bytes,
    }
    for name, value in switches.items():
        if not isinstance(value, bool | _Unchanged):
            raise TypeError(f"{name} is True or False, not {value!r}")
    _check_host_pool(limits)
    fraction = whole_fraction if isinstance(whole_fraction, _Unchanged) else _check_fraction(whole_fraction)
    folder = _check_folder(disk_directory)
    if driver_choice.is_off():
        return
    apply_environment()
    for name, size_bytes in limits.items():
        _core.set_limit(name, size_bytes)
    for name, value in switches.items():
        if not isinstance(value, _Unchanged):
            _core.set_option(name, value)
    if not isinstance(folder, _Unchanged):
        _core.set_disk_directory(folder)
    if not isinstance(fraction, _Unchanged):
        _core.set_whole_fraction(fraction)
    if "host_pool" in limits:
        _fill_host_pool()


def _check_host_pool(limits: dict[str, int]) -> None:
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (asked := limits.get("host_pool", 0)) > ram_bytes:
        raise ValueError(
            f"host_pool is {format_size(asked)}, and this machine has {format_size(ram_bytes)} of RAM: ask for less"
        )


def _fill_host_pool() -> None:
    from ebbtide.saver import pools  # which needs this module

    backend = pools.existing_backend()  # where there is none yet, the first region that overflows fills the pool
    for device in backend.devices() if backend else ():
        _core.fill_host_pool(device)


def _check_fraction(fraction: object) -> float:
    if isinstance(fraction, bool) or not isinstance(fraction, int | float):
        raise TypeError(f"whole_fraction is a number from 0 to 1, not {type(fraction).__name__}")
    if not 0 <= fraction <= 1:
        raise ValueError(f"whole_fraction is a number from 0 to 1, not {fraction!r}")
    return float(fraction)


def _check_folder(folder: object) -> str | Literal[_Unchanged.UNCHANGED] | None:
    if folder is None or isinstance(folder, _Unchanged):
        return folder
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"disk_directory is a path, not {type(folder).__name__}")
    path = os.fspath(folder)
    if not isinstance(path, str):
        raise TypeError("disk_directory is a path of text, not of bytes")
    if not path or "\0" in path:
        raise ValueError(f"disk_directory is no path: {path!r}")
    return path


def apply_environment() -> None:
    """Sets what the variables of limits and switches say, at the first call.

    Raises:
        ValueError: one of them is no size, no fraction, or neither 0 nor 1.
    """
    global _environment_is_applied
    with _lock:
        if _environment_is_applied:
            return
        sizes = {
            name: parse_size(os.environ[variable], variable)
            for name, variable in _SIZE_VARIABLES.items()
            if os.environ.get(variable)
        }
        switches = {
            name: _parse_switch(os.environ[variable], variable)
            for name, variable in _SWITCH_VARIABLES.items()
            if os.environ.get(variable)
        }
        share = os.environ.get(_FRACTION_VARIABLE)
        fraction = _parse_fraction(share) if share else None
        for name, size_bytes in sizes.items():
            _core.set_limit(name, size_bytes)
        if fraction is not None:
            _core.set_whole_fraction(fraction)
        for name, is_on in switches.items():
            _core.set_option(name, is_on)
        _environment_is_applied = True


def _parse_switch(text: str, variable: str) -> bool:
    if text.strip() not in ("0", "1"):
        raise ValueError(f"{variable} must be 0 or 1, not {text[:40]!r}")
    return text.strip() == "1"


def _parse_fraction(text: str) -> float:
    try:
        return _check_fraction(float(text))
    except ValueError:
        raise ValueError(f"{_FRACTION_VARIABLE} must be a number from 0 to 1, not {text[:40]!r}") from None
