"""`saver.share`, `saver.attach` and `saver.keep`."""

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


def share(tensor: "torch.Tensor") -> Shared:
    """Lets other processes of this user use the memory of `tensor`, which lies in a region with exportable=True.

        with saver.region("weights", exportable=True):
            weight = torch.randn(4096, 4096, device=saver.device)
        queue.put(saver.share(weight))      # another process: saver.attach(queue.get())

    The result is plain data, which may be pickled and sent in any way. It does not keep the tensor alive: it is stale
    once the tensor is gone, or its tag was paused. While another process has the tensor attached, it lives on here, and
    a pause of its tag is refused, unless that process agreed to it. What is queued on the current stream is waited for;
    for all later writes the two programs must agree on an order.

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
    return Shared(*offered, str(tensor.dtype), tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


def attach(shared: Shared, *, pauseable: bool = False) -> "torch.Tensor":
    """The tensor that another process has shared: the same memory, without a copy.

        weight = saver.attach(shared)

    The memory is given up when the last tensor over it is gone, also by the end of this process, and outlives the
    process that shared it. It belongs to no region here. In the process that shared it, this is a tensor over the same
    storage.

    Args:
        shared: the result of `saver.share`.
        pauseable: True: the owner may pause the tag. This process then loses access, once its queued work is done,
            until the owner has resumed it; use no tensor of it meanwhile. The programs must tell one another.

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
    dtype = getattr(torch, shared.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"this torch has no {shared.dtype}")
    _require_driver("attach")
    from ebbtide.saver.sharing import storages

    storage = storages.attach(shared.offered, agrees=pauseable)
    whole = torch.empty(0, dtype=dtype, device=storage.device)
    return whole.set_(storage, shared.offset, shared.shape, shared.stride)


def keep(tensor: "torch.Tensor") -> Callable[[], None]:
    """Keeps the memory of `tensor` on the device: pauses, demotions and trims of its tag pass it by.

        let_go = saver.keep(buffer)     # then NCCL, NIXL or Mooncake may register it

    It counts in a Report's `remaining`, and as `kept_bytes` of its tag. What else lies in the same allocation stays as
    well (torch's segments of 2 and 20 MiB hold several small tensors). The tensor lives on until the returned function
    is called.

    Returns:
        A function that ends it. Called again, it does nothing.

    Raises:
        TypeError: no plain strided tensor.
        StateError: it lies in no region, or a part of it is not on the device; the device has no room to part it from
            memory with which a resume brought it back; ebbtide is off.
    """
    check_plain(tensor, "keep", is_read=False)
    _require_driver("keep")
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or _core.find(storage.data_ptr()) is None:
        raise StateError("keep: this tensor has no memory in a region")
    address = storage.data_ptr()
    _core.keep(address)
    return partial(_let_go, [(storage, address)])


def _let_go(kept: list[tuple[object, int]]) -> None:
    with _lock:
        if kept:
            _core.end_keep(kept.pop()[1])


def _require_driver(caller: str) -> None:
    if driver_choice.choose_for_tensors() == "off":
        raise StateError(f"{caller} needs a driver, and ebbtide is off (EBBTIDE_DRIVER=off)")
