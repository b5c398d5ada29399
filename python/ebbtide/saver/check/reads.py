"""EBBTIDE_CHECK=1: reads of a tensor's memory that are no ops, and so pass a dispatch mode unseen.

torch turns modes off inside `repr`, and `tolist`, `numpy`, DLPack and pickling are no ops. The first `ops.enable` wraps
these methods in torch's classes, for all threads. A process that never checks has nothing wrapped.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

TENSOR_METHODS = (
    *("__repr__", "tolist", "numpy", "__array__", "__dlpack__", "__reduce_ex__", "__deepcopy__"),
    *("apply_", "map_", "map2_", "new_tensor"),
)
STORAGE_METHODS = ("__reduce__", "_write_file", "byteswap", "resize_")
_INTERFACE = "__cuda_array_interface__"
is_on = False
_is_installed = False

Look = Callable[[str, Any], None]


def begin(look: Look) -> None:
    """From now on, `look(name, values)` is called before each read. It raises if one of the values, tensors and
    storages, is away."""
    global is_on, _is_installed
    if not _is_installed:
        _is_installed = True
        _install(look)
    is_on = True


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
        # copy.copy asks for a tensor's pickle, then shares its memory without reading it.
        if is_on and sys._getframe(1).f_globals.get("__name__") != "copy":
            look(title, (args, kwargs))
        return original(*args, **kwargs)

    return checked
