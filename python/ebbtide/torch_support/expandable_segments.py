"""Switches expandable segments of torch's CUDA allocator off, with which regions cannot work before torch 2.13.

Before that version such a segment is torch's own mapping: a pool's allocator is not asked, so nothing could be paused.
torch can switch them off while it runs. Tensors in segments that exist stay as they are, and torch hands out nothing
more of those segments. The setting is that of the whole process, a region may begin in any thread at any time, and its
pools keep their segments. So it stays off from the first region on: where the program switches it on later, only its
other settings are passed on. The exception is LMS, which wants such segments (`prefer`): then they are off only while a
pool of ours is open.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from ebbtide import _core, logs
from ebbtide.errors import StateError
from ebbtide.torch_support import torch_names, versions
from ebbtide.torch_support.allocator_settings import (
    ALLOCATOR_VARIABLES,
    EXPANDABLE_SEGMENTS_FROM,
    has_expandable_segments,
    says_no_expandable_segments,
    switched_on_by,
    with_expandable_segments,
    without_expandable_segments,
)

PAGE_BYTES = 20 << 20  # torch maps so much of a large segment at once, and its limit does not count what is more


class _Preference:
    is_on = False
    undo: Callable[[], Any] | None = None  # from torch 2.13 on


_now = _Preference()
_SETTERS = ("_C._accelerator_setAllocatorSettings", "_C._cuda_cudaCachingAllocator_set_allocator_settings")


def keep_off(version: tuple[int, int]) -> None:
    """Switches them off where regions can't work with them, and keeps them off for the life of the process. While LMS
    prefers them, each open region does that instead.

    Raises:
        StateError: this torch can't. The error says what to set.
    """
    if version >= EXPANDABLE_SEGMENTS_FROM:
        return
    variable = switched_on_by(os.environ, version)
    is_on, settings = _in_force()
    if not _now.is_on and (variable if is_on is None else is_on):
        settings = settings or os.environ.get(variable, "")
        if not _switch_off(settings):
            raise StateError(_refusal(version, variable or ALLOCATOR_VARIABLES[0], settings))
        import torch

        torch.cuda.empty_cache()  # torch hands out cached memory of such segments no more
        _say_once()
    _watch()


def prefer() -> None:
    """Switches them on for memory outside regions until `prefer_no_more`, except where the environment says
    "expandable_segments:False", or the preload library follows torch's segments. Before torch 2.13 they are off while a
    region is open or a graph is captured.
    """
    import torch

    tagging, *_ = _core.program_policy()
    is_followed = tagging != _core.TAGGING_UNSET
    if is_followed or any(says_no_expandable_segments(os.environ.get(name, "")) for name in ALLOCATOR_VARIABLES):
        return
    setter, settings = torch_names.find(*_SETTERS), _all_settings()
    _now.is_on = True
    if versions.torch_version(torch.__version__) < EXPANDABLE_SEGMENTS_FROM:
        _core.expand_segments(setter, with_expandable_segments(settings), without_expandable_segments(settings))
    elif not are_on():
        _now.undo = lambda: setter(without_expandable_segments(settings))  # noted first, for the sake of an interrupt
        setter(with_expandable_segments(settings))
    _settle_the_kind_of_handle()


def _settle_the_kind_of_handle() -> None:
    """Has torch make one such segment. It tries fabric handles first and notes for the whole process what it found:
    two threads that make their first ones at once, each on a GPU of its own, find half of that, and one raises.
    """
    import torch

    if torch.cuda.is_initialized():  # a context is not ours to make: the program may fork yet
        # A stream that has no cached blocks. The error is torch's to raise, where the program asks for memory.
        with contextlib.suppress(torch.OutOfMemoryError), torch.cuda.stream(torch.cuda.Stream()):
            torch.empty(1, device="cuda")


def prefer_no_more() -> None:
    """Undoes `prefer`."""
    _now.is_on = False
    _core.expand_segments(None)
    undo, _now.undo = _now.undo, None
    if undo is not None:
        undo()


def _all_settings() -> str:
    """As they were last given to torch: torch forgets those that a later call does not name."""
    _, settings = _in_force()
    return settings or next((value for name in ALLOCATOR_VARIABLES if (value := os.environ.get(name, ""))), "")


def are_preferred() -> bool:
    """Whether `prefer` holds."""
    return _now.is_on


def are_on() -> bool:
    """Whether torch maps the segments of its own pools itself, past the preload library."""
    import torch

    if versions.torch_version(torch.__version__) < EXPANDABLE_SEGMENTS_FROM:
        return False  # since the first region
    is_on, _ = _in_force()
    if is_on is None:
        return any(has_expandable_segments(os.environ.get(name, "")) for name in ALLOCATOR_VARIABLES)
    return is_on


def _in_force() -> tuple[bool | None, str]:
    """Whether they are on, and all settings as they were last given to torch; None where torch does not say."""
    try:
        found = torch_names.find("cuda.memory._snapshot")()["allocator_settings"]
        return bool(found["expandable_segments"]), found.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    # A CPU build has no such function, and the format of torch's snapshot is not stable.
    except (StateError, AttributeError, LookupError, TypeError, RuntimeError):
        return None, ""


def _switch_off(settings: str) -> bool:
    try:
        # All settings: torch takes those that are not named for their defaults.
        torch_names.find(*_SETTERS)(without_expandable_segments(settings))
    except (StateError, RuntimeError, ValueError):  # torch raises the latter two for settings that it can't change
        return False
    return _in_force()[0] is not True


def _watch() -> None:
    """From now on torch's functions that change the settings leave expandable segments off."""
    import torch

    for path in _SETTERS:
        name = path.rpartition(".")[2]
        if hasattr(torch._C, name) and not hasattr(getattr(torch._C, name), torch_names.ORIGINAL):
            setattr(torch._C, name, _keeping_off(getattr(torch._C, name)))


def _keeping_off(setter: Callable[[str], Any]) -> Callable[[str], Any]:
    @functools.wraps(setter)
    def set_settings(settings: str) -> Any:
        if isinstance(settings, str) and _now.is_on:
            return _core.expand_segments(
                setter, with_expandable_segments(settings), without_expandable_segments(settings)
            )
        if isinstance(settings, str) and has_expandable_segments(settings):
            settings = without_expandable_segments(settings)
            _say_once()
        return setter(settings)

    setattr(set_settings, torch_names.ORIGINAL, setter)
    return set_settings


@functools.cache
def _say_once() -> None:
    logs.log(
        logging.WARNING,
        "torch's expandable segments are off from now on: before torch 2.13 a region's memory would lie in them, past "
        "its pool, and could not be paused",
    )


def _refusal(version: tuple[int, int], variable: str, settings: str) -> str:
    return (
        f"torch's expandable segments are on, and torch {version[0]}.{version[1]} does not let them be switched off: "
        "it would take memory past the pools, so that nothing could be paused. Start the program with "
        f"{variable}={without_expandable_segments(settings)}"
    )
