"""Refuses to send a region's CUDA tensor to another process, with an error that names the tag.

CUDA cannot export memory that is mapped the way regions map it, and torch's own error is "invalid argument". All of
`torch.multiprocessing` uses this method of a storage. CPU tensors on the simulated device are left to torch, which
moves them into shared memory and so out of their region.
"""

import functools
import os
import sys
from typing import Any

import torch

from ebbtide import _core
from ebbtide.errors import StateError

METHODS = ("_share_cuda_",)


_refusing_classes: set[type] = set()


def install(owner: type = torch.UntypedStorage) -> None:
    """From now on, storages in regions refuse to be shared. Called again for a class, it does nothing."""
    if owner in _refusing_classes:
        return
    _refusing_classes.add(owner)
    for name in METHODS:
        setattr(owner, name, _refusing(getattr(owner, name)))


def _refusing(share: Any) -> Any:
    @functools.wraps(share)
    def refuse_or_share(storage: Any, *args: Any, **kwargs: Any) -> Any:
        found = _core.find(storage.data_ptr())
        if found is not None:
            tag, disabled = _words_for(found.tag)
            raise StateError(
                f"a tensor in tag {tag!r} can't be shared with another process: send a copy that is made outside "
                f"of regions (`with {disabled}: copy = tensor.clone()`)"
            )
        return share(storage, *args, **kwargs)

    return refuse_or_share


def _words_for(tag: str) -> tuple[str, str]:
    """The tag and the way out of regions, as a program writes them that uses torch_memory_saver's calls, or the
    saver's."""
    if "torch_memory_saver" in sys.modules:
        return os.fsdecode(_core.decode_tag(tag)), "torch_memory_saver.disable()"
    return tag, "saver.disabled()"
