"""A program whose every allocation has one tag: `ebbtide run --pauseable`.

The preload library gives the tag to all that the program allocates on a device, before Python and past it. Here is
what the saver must know of that: which tag, which backup.
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
    """What all of this program's allocations are members of. `backup` is the core's code."""

    tag: str
    backup: int


def read(environment: Mapping[str, str], library: str) -> Program | None:
    """What the preload library reads from the environment; None where it gives no tag.

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
    """This program, if it is one; as it was when the saver was imported."""
    return _own
