"""ebbtide: GPU memory for PyTorch that leaves and comes back at the same addresses.

Importing this package touches no driver, no GPU and no torch; the first use of `saver` does.
"""

from typing import TYPE_CHECKING

from ebbtide import compat, integrations
from ebbtide.errors import DriverError, Error, OutOfMemoryError, StateError, StoreError
from ebbtide.late_imports import late_imports

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
    __getattr__ = late_imports(
        __name__,
        {
            "__version__": "ebbtide._core:__version__",
            "env": "ebbtide.launch.preloading:env",
            "lms": "ebbtide.lms",
            "preloaded": "ebbtide.launch.preloaded:preloaded",
            "saver": "ebbtide.saver",
        },
    )


def __dir__() -> list[str]:
    return sorted(__all__)
