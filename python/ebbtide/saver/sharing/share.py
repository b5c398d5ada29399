"""`saver.share`, `saver.attach` and `saver.keep`."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ebbtide import _core, driver_choice
from ebbtide.errors import StateError
from ebbtide.locks import make_lock
from ebbtide.saver.sharing.shared import Shared
from ebbtide.saver.tensors.plain import check_plain
from ebbtide.saver.values.arguments import check_flag

if TYPE_CHECKING:
    import torch

_lock = make_lock()
_kept: dict[int, tuple[object, int]] = {}  # storages, and where they lie: also of those who forgot how to end it
_numbers = itertools.count()


def share(tensor: "torch.Tensor") -> Shared:
    """Lets other processes of this user use the memory of `tensor`, which lies in a region with exportable=True.

        with saver.region("shared", exportable=True):
            weight = torch.randn(4096, 4096, device=saver.device)
        shared = saver.share(weight)  # send it to another process, for saver.attach(shared)

    The result is plain data, which may be pickled and sent in any way. It does not keep the tensor alive: it is stale
    once the tensor is gone, or its tag was paused. While another process has the tensor attached, it lives on here, and
    a pause of its tag is refused, unless that process agreed to it. What is queued on the current stream is waited for;
    for all later writes the two programs must agree on an order.

    Don't resize the storage of a shared tensor (as FSDP1 does with `resize_(0)`): its memory would become another's.
    Whoever has the result and runs as this user can write to the memory, and to what else lies in the same allocation
    (torch's segments of 2 and 20 MiB hold several small tensors).

    `torch.multiprocessing` shares tensors of such regions in the same way (`queue.put(tensor)`).

    Raises:
        TypeError: no plain strided tensor.
        StateError: it lies in no region with exportable=True; ebbtide is off; this process can't join the others
            (docs/processes.md).
    """
    check_plain(tensor, "share", is_read=True)
    _require_driver("share")
    from ebbtide.saver.sharing import storages

    storage = tensor.untyped_storage()
    offered = storages.offer(storage, is_held=False)
    return Shared(
        *offered,
        dtype=str(tensor.dtype),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=tensor.storage_offset(),
        is_conj=tensor.is_conj(),
        is_neg=tensor.is_neg(),
    )


def attach(shared: Shared, *, pauseable: bool = False) -> "torch.Tensor":
    """The tensor that another process has shared: the same memory, without a copy.

        with saver.region("shared", exportable=True):
            weight = torch.randn(4096, 4096, device=saver.device)
        same = saver.attach(saver.share(weight))  # in another process, which was sent the share

    The memory is given up when the last tensor over it is gone, also by the end of this process, and outlives the
    process that shared it. It belongs to no region here. In the process that shared it, this is a tensor over the same
    storage.

    Args:
        shared: the result of `saver.share`.
        pauseable: True: the owner may pause the tag. This process then loses access, once its queued work is done,
            until the owner has resumed it; use no tensor of it meanwhile, nor if the owner ends meanwhile: then it is
            lost. The programs must tell one another: the owner's "before_pause" hooks run before it is taken.

    Raises:
        TypeError: no Shared.
        StateError: it is stale; the owner is gone, or does not answer; its device is none of this process's; ebbtide is
            off.
        DriverError: the driver refused the memory.
    """
    import torch

    if not isinstance(shared, Shared):
        raise TypeError(f"attach takes the result of saver.share, not {type(shared).__name__}")
    check_flag(pauseable, "pauseable")
    if not (isinstance(shared.owner, str) and isinstance(shared.nonce, str) and isinstance(shared.generation, int)):
        raise TypeError(f"this is no result of saver.share: {shared}")
    dtype = getattr(torch, shared.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"this torch has no {shared.dtype}")
    _require_driver("attach")
    from ebbtide.saver.sharing import storages, torch_queues

    torch_queues.install()  # which refuses to send it on
    storage = storages.attach(shared._offered, agrees=pauseable)
    whole = torch.empty(0, dtype=dtype, device=storage.device)
    plain = whole.set_(storage, shared.offset, shared.shape, shared.stride)
    found = plain.conj() if shared.is_conj else plain
    return found._neg_view() if shared.is_neg else found


def keep(tensor: "torch.Tensor") -> Callable[[], None]:
    """Keeps the memory of `tensor` on the device: pauses, demotions and trims of its tag pass it by.

        let_go = saver.keep(cache)  # then NCCL, NIXL or Mooncake may register it
        let_go()

    It counts in a Report's `remaining`, and as `kept_bytes` of its tag. What else lies in the same allocation stays as
    well (torch's segments of 2 and 20 MiB hold several small tensors). The tensor lives on until the returned function
    is called.

    Returns:
        A function that ends it. Called again, it does nothing.

    Raises:
        TypeError: no plain strided tensor.
        StateError: it lies in no region, or a part of it is not on the device; ebbtide is off. Where a resume has
            brought it back behind one handle with its neighbours, also: a region of its tag is open, a capture is under
            way, or the device has no room to part them.
    """
    check_plain(tensor, "keep", is_read=False)
    _require_driver("keep")
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or _core.find(storage.data_ptr()) is None:
        raise StateError("keep: this tensor has no memory in a region")
    address, number = storage.data_ptr(), next(_numbers)
    _core.keep(address)
    _kept[number] = (storage, address)
    return partial(_let_go, number)


def _let_go(number: int) -> None:
    with _lock:
        if number in _kept:
            _core.end_keep(_kept.pop(number)[1])


def _require_driver(caller: str) -> None:
    if driver_choice.choose_for_tensors() == "off":
        raise StateError(f"{caller} needs a driver, and ebbtide is off (EBBTIDE_DRIVER=off)")
