"""Sending a region's tensor to another process is an error of ours that names the tag.

CUDA can't export memory that is mapped as regions map theirs: torch's own error is "invalid argument". On the simulated
device torch would move the tensor into shared memory, silently out of its region.

All of `torch.multiprocessing`, and `share_memory_`, go through these methods of a storage (torch 2.6 to 2.15).
"""

import functools
from typing import Any

import torch

from ebbtide import _core
from ebbtide.errors import StateError

METHODS = ("_share_cuda_", "_share_fd_cpu_", "_share_filename_cpu_")


def install(owner: type = torch.UntypedStorage) -> None:
    """From now on storages in regions refuse to be shared. Once a class."""
    for name in METHODS:
        setattr(owner, name, _refusing(getattr(owner, name)))


def _refusing(share: Any) -> Any:
    @functools.wraps(share)
    def refuse_or_share(storage: Any, *args: Any, **kwargs: Any) -> Any:
        found = _core.find(storage.data_ptr())
        if found is not None:
            raise StateError(
                f"a tensor in tag {found.tag!r} can't be shared with another process: send a copy that is made outside "
                "of regions (`with saver.disabled(): copy = tensor.clone()`)"
            )
        return share(storage, *args, **kwargs)

    return refuse_or_share
