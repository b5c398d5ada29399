"""The address and size of the bytes that tensors span."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ebbtide.saver.tensors.walk import TensorWalk, why_without_memory
from ebbtide.saver.values.order import Order
from ebbtide.saver.values.segments import Range

if TYPE_CHECKING:
    import torch


def range_of(tensor: "torch.Tensor") -> Range | None:
    """The bytes that a strided tensor spans by its shape, strides and offset; None where it spans none."""
    if why_without_memory(tensor) is not None or tensor.is_meta:
        return None
    if tensor.is_nested:  # its sizes are a tensor that may be away as well
        storage = tensor.untyped_storage()
        return (storage.data_ptr(), storage.nbytes()) if storage.nbytes() else None
    if tensor.numel() == 0:
        return None
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (reach + 1) * tensor.element_size()


def ranges_of(things: Any, caller: str) -> Sequence[tuple[int, Range]]:
    """(device ordinal, range) of a tensor, of a module's parameters and buffers, or of a list of these: in
    their order, each once. A CPU tensor is on 0. Those of an Order, which may be in the list, are known.

    Raises:
        TypeError: something else; the message names `caller`.
    """
    if isinstance(things, Order):
        return things.ranges
    walk = TensorWalk(caller, with_gradients=False)
    found: dict[tuple[int, Range], None] = {}
    for thing in things if isinstance(things, list | tuple) else (things,):
        if isinstance(thing, Order):
            found.update(dict.fromkeys(thing.ranges))
            continue
        for tensor in (thing,) if walk.is_plain(thing) else walk.walk(thing):
            reached = range_of(tensor)
            if reached is not None:
                found[max(tensor.get_device(), 0), reached] = None
    return list(found)
