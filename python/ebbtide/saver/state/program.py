"""The program of `ebbtide run --pauseable`, whose every allocation has one tag.

The preload library tags everything that the program allocates on a device, before Python starts and outside of it. This
module tells the saver which tag and which backup that is.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ebbtide import _core, settings
from ebbtide.launch.preloading import LIBRARY_NAME
from ebbtide.saver.values.arguments import backup_code


@dataclass(frozen=True)
class Program:
    """The tag of all allocations of this program. `backup` is a core code."""

    tag: str
    backup: int


def read(environment: Mapping[str, str], library: str) -> Program | None:
    """What the preload library reads from the environment; None where it tags nothing.

    Args:
        library: the file that the core was loaded from.
    """
    if Path(library).name != LIBRARY_NAME or settings.read_or_fallback("preload", environment) == "0":
        return None
    is_cuda = settings.read_or_fallback("driver", environment) not in ("sim", "off")
    if not is_cuda or settings.read_or_fallback("pauseable", environment) != "1":
        return None
    backup = settings.read_or_fallback("backup", environment)
    return Program(settings.read_or_fallback("tag", environment), backup_code(None if backup == "none" else backup))


_own = read(os.environ, _core.loaded_library())


def own() -> Program | None:
    """This program as it was when the saver was imported; None where it is not pauseable."""
    return _own
