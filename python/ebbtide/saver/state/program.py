"""The program of `ebbtide run --pauseable`, whose every allocation by torch has one tag.

The preload library tags the program's allocations on a device, before Python starts and outside of it. This module
tells the saver which tag and which backup that is.
"""

from dataclasses import dataclass

from ebbtide import _core


@dataclass(frozen=True)
class Program:
    """The tag of all allocations of this program. `backup` is a core code."""

    tag: str
    backup: int


# The preload library's policy in threads that have none of their own. It decides once, when it is loaded.
_tagging, _tag, _backup = _core.program_policy()
_has_hooks = _tagging != _core.TAGGING_UNSET
_own = Program(_tag, _backup) if _tagging == _core.TAGGING_ON else None


def has_hooks() -> bool:
    """Whether the preload library acts in this process."""
    return _has_hooks


def own() -> Program | None:
    """This program; None where it is not pauseable."""
    return _own
