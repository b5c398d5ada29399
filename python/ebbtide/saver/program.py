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

from ebbtide import _core
from ebbtide.errors import Error
from ebbtide.preloading import LIBRARY_NAME
from ebbtide.saver.names import NO_BACKUP_CODE, backup_code, check_tag

DEFAULT_TAG = "default"
_BACKUP_WORDS = ("ram", "pinned", "disk")


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
    is_preloaded = Path(library).name == LIBRARY_NAME and environment.get("EBBTIDE_PRELOAD") != "0"
    is_cuda = environment.get("EBBTIDE_DRIVER") not in ("sim", "off")
    if not is_preloaded or not is_cuda or environment.get("EBBTIDE_PAUSEABLE") != "1":
        return None
    return Program(_read_tag(environment.get("EBBTIDE_TAG")), _read_backup(environment.get("EBBTIDE_BACKUP")))


def _read_tag(text: str | None) -> str:
    try:
        return check_tag(text) if text else DEFAULT_TAG
    except ValueError:  # the library has said so
        return DEFAULT_TAG


def _read_backup(text: str | None) -> int:
    if text == "none":
        return NO_BACKUP_CODE
    return backup_code(text if text in _BACKUP_WORDS else "ram")


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
