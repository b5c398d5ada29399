"""ebbtide: GPU memory for PyTorch that leaves and comes back at the same addresses.

Importing this package touches no driver, no GPU and no torch; the first use of `saver` does.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ebbtide import compat, integrations
from ebbtide.errors import DriverError, Error, OutOfMemoryError, StateError, StoreError

if TYPE_CHECKING:
    from ebbtide import lms, saver
    from ebbtide.launch.preloaded import preloaded
    from ebbtide.launch.preloading import env

    __version__: str

__all__ = [
    "DriverError",
    "Error",
    "OutOfMemoryError",
    "StateError",
    "StoreError",
    "__version__",
    "compat",
    "env",
    "integrations",
    "lms",
    "preloaded",
    "saver",
]


if not TYPE_CHECKING:  # a checker would take any name for one of them

    def __getattr__(name: str) -> Any:
        if name == "saver":
            return importlib.import_module("ebbtide.saver")
        if name == "lms":
            return importlib.import_module("ebbtide.lms")
        if name == "env":
            return importlib.import_module("ebbtide.launch.preloading").env
        if name == "preloaded":
            return importlib.import_module("ebbtide.launch.preloaded").preloaded
        if name == "__version__":
            return str(importlib.import_module("ebbtide._core").version())
        raise AttributeError(f"module 'ebbtide' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
