"""Tensors whose address other libraries have read through `__cuda_array_interface__` since the first region.

By the rules of the interface, a reader keeps the Python object whose address it uses. So once the object is gone, no
reader is left. Single operations on a dict need no lock, which a forked child could find taken.
"""

import functools
import weakref
from typing import Any

import torch

_NAME = "__cuda_array_interface__"
_read_from: "dict[int, weakref.ref[torch.Tensor]]" = {}


def install(owner: type = torch.Tensor) -> None:
    """From now on, records which tensors are read. To be called once for a class."""
    read = vars(owner)[_NAME].fget

    @functools.wraps(read)
    def noting(tensor: torch.Tensor) -> Any:
        interface = read(tensor)
        _read_from[id(tensor)] = weakref.ref(tensor)
        return interface

    setattr(owner, _NAME, property(noting))


def living() -> list[torch.Tensor]:
    """The tensors that were read and are still alive."""
    found = []
    for key, known in list(_read_from.items()):
        tensor = known()
        if tensor is not None:
            found.append(tensor)
        elif _read_from.get(key) is known:
            del _read_from[key]
    return found
