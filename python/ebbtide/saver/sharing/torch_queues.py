"""torch.multiprocessing, and all that sends tensors by its reductions: tensors of exportable regions are shared.

On a GPU these methods of a storage are used by all of them, also by those that took `reduce_tensor` before: what the
one answers, the other is given in the other process, and between them it is any object that can be pickled. A tensor of
another region is refused, with an error that names its tag: torch's own is "invalid argument".

On the simulated device torch moves CPU tensors into shared memory, and so out of their region, unless that is
exportable.
"""

import functools
import json
import os
import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from ebbtide import _core
from ebbtide.errors import StateError
from ebbtide.processes import borrowed
from ebbtide.processes.offers import Offered
from ebbtide.saver.sharing import storages

_installed: set[type] = set()


class Handle(bytes):
    """In place of CUDA's handle. Unpickling it loads this module, and so installs the method that takes it."""

    def __reduce__(self) -> tuple[type["Handle"], tuple[bytes]]:
        return Handle, (bytes(self),)


def install(owner: Any = torch.UntypedStorage) -> None:
    """From now on, storages in regions are shared by ebbtide. Called again for a class, it does nothing."""
    if owner in _installed:
        return
    _installed.add(owner)
    owner._share_cuda_ = _sharing(owner._share_cuda_)
    owner._new_shared_cuda = staticmethod(_attaching(owner._new_shared_cuda))
    owner._release_ipc_counter_cuda = staticmethod(_counting(owner._release_ipc_counter_cuda))
    if owner is torch.UntypedStorage:
        ForkingPickler.register(torch.UntypedStorage, _reducing(reductions.reduce_storage))


def _sharing(torchs: Any) -> Any:
    @functools.wraps(torchs)
    def share_in_regions(storage: Any, *args: Any, **kwargs: Any) -> Any:
        found = _find(storage)
        if found is None and not borrowed.is_borrowed(storage.data_ptr()):
            return torchs(storage, *args, **kwargs)
        handle = _handle_of(storage, found)
        return storage.device.index, handle, storage.nbytes(), 0, b"", 0, b"", False

    return share_in_regions


def _attaching(torchs: Any) -> Any:
    @functools.wraps(torchs)
    def attach_or_open(device: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(handle, Handle):
            return torchs(device, handle, *args, **kwargs)
        return _attach(handle)

    return attach_or_open


def _counting(torchs: Any) -> Any:
    @functools.wraps(torchs)
    def count_torchs_own(handle: Any, *args: Any, **kwargs: Any) -> Any:
        return torchs(handle, *args, **kwargs) if handle else None

    return count_torchs_own


def _reducing(torchs: Any) -> Any:
    def reduce_in_regions(storage: Any) -> Any:
        is_cpu = storage.device.type == "cpu"
        found = _find(storage) if is_cpu else None
        is_ours = found is not None and found.is_exportable
        if not is_ours and not (is_cpu and borrowed.is_borrowed(storage.data_ptr())):
            return torchs(storage)
        return _attach, (_handle_of(storage, found),)

    return reduce_in_regions


def _find(storage: Any) -> "_core.AllocationInfo | None":
    try:
        return _core.find(storage.data_ptr())
    except StateError:  # in a forked child, such as a worker of a DataLoader: no region is its own
        return None


def _handle_of(storage: Any, found: "_core.AllocationInfo | None") -> Handle:
    if found is not None and not found.is_exportable:
        tag, disabled = _words_for(found.tag)
        raise StateError(
            f"a tensor in tag {tag!r} can't be shared with another process: enter its region with exportable=True, or "
            f"send a copy that is made outside of regions (`with {disabled}: copy = tensor.clone()`)"
        )
    return Handle(json.dumps(storages.offer(storage, is_held=True)).encode())


def _attach(handle: Handle) -> Any:
    owner, nonce, generation = json.loads(handle)
    return storages.attach(Offered(owner, nonce, generation))


def _words_for(tag: str) -> tuple[str, str]:
    """The tag and the way out of regions, as a program writes them that uses torch_memory_saver's calls, or the
    saver's."""
    if "torch_memory_saver" in sys.modules:
        return os.fsdecode(_core.decode_tag(tag)), "torch_memory_saver.disable()"
    return tag, "saver.disabled()"


install()
