"""EBBTIDE_CHECK=1, beside ops: what reads a tensor's memory, or hands it out, without being an op that a mode sees.

torch turns modes off inside `repr`, and `tolist`, `numpy`, DLPack and pickling are no ops. These are wrapped in torch's
classes at the first `check.enable`, for all threads; where no check is on they ask one set. Nothing is wrapped in a
process that never checks.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

TENSOR_METHODS = (
    *("__repr__", "tolist", "numpy", "__array__", "__dlpack__", "__reduce_ex__", "__deepcopy__"),
    *("apply_", "map_", "map2_", "new_tensor"),
)
STORAGE_METHODS = ("__reduce__", "_write_file", "byteswap", "resize_")
_INTERFACE = "__cuda_array_interface__"
_open_checks: set[object] = set()
_is_installed = False

Look = Callable[[str, Any], None]


def begin(mode: object, look: Look) -> Callable[[], bool | None]:
    """A check begins, and ends with the call of what this returns (which tells whether it was the last), or with the
    mode, as with its thread. `look(name, values)` raises where one of the values, tensors and storages, is away."""
    global _is_installed
    if not _is_installed:
        _is_installed = True
        _install(look)
    check = object()
    _open_checks.add(check)
    end = weakref.finalize(mode, _end, check)
    end.atexit = False
    return end


def _end(check: object) -> bool:
    _open_checks.discard(check)
    return not _open_checks


def _install(look: Look) -> None:
    for owner, names in ((torch.Tensor, TENSOR_METHODS), (torch.UntypedStorage, STORAGE_METHODS)):
        for name in names:
            _replace(owner, name, f"{owner.__name__}.{name}", look)
    for module in (torch.utils.dlpack, torch):
        _replace(module, "to_dlpack", "to_dlpack", look)
    interface = torch.Tensor.__dict__[_INTERFACE]
    setattr(torch.Tensor, _INTERFACE, property(_checked(interface.fget, f"Tensor.{_INTERFACE}", look)))


def _replace(owner: Any, name: str, title: str, look: Look) -> None:
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, _checked(original, title, look))


def _checked(original: Callable[..., Any], title: str, look: Look) -> Callable[..., Any]:
    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        # copy.copy asks how to pickle a tensor, and then shares its memory without a look at it.
        if _open_checks and sys._getframe(1).f_globals.get("__name__") != "copy":
            look(title, (args, kwargs))
        return original(*args, **kwargs)

    return checked
