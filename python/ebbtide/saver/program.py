"""A program whose every allocation has one tag: `ebbtide run --pauseable`.

The preload library gives the tag to all that the program allocates on a device, before Python and past it. Here is
what the saver must know of that: which tag, which backup.
"""

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ebbtide import _core, settings
from ebbtide.errors import Error
from ebbtide.preloading import LIBRARY_NAME
from ebbtide.saver.names import backup_code


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


def introduce() -> None:
    """In a pauseable program: makes its tag known before it allocates, and torch's captures, if torch is there."""
    if _own is None:
        return
    with contextlib.suppress(Error):  # a forked child, where nothing can be paused
        _core.bind_slot(_own.tag, 0, _own.backup)
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None:
        from ebbtide.saver import captures

        captures.install()
