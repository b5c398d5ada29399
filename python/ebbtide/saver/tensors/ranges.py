"""The address and size of the bytes that tensors span."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ebbtide.saver.tensors.walk import TensorWalk, why_without_memory
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


class Order:
    """Where the bytes of tensors lie, in an order: what `saver.order` returns.

        saver.resume("weights", wait=False, order=saver.order(model))

    It keeps no tensor alive.
    """

    def __init__(self, ranges: Sequence[tuple[int, Range]]) -> None:
        self.ranges = tuple(ranges)  # (device ordinal, range)

    def __repr__(self) -> str:
        return f"<saver.Order of {len(self.ranges)} tensors>"


def order(things: Any) -> Order:
    """Finds out once what `resume(order=)` and `Pending.stream_wait(tensors=)` would find out each time, for programs
    that wake up often: 0.1 to 2 ms for a model of 290 tensors.

        first = saver.order(model)
        saver.resume("weights", wait=False, order=first)

    It notes addresses, which stay the same while the tensors live. Make a new one after tensors were added or
    replaced: those would not be among the first, and nobody would wait for them.

    Args:
        things: a tensor, a module (its parameters and buffers), or a list of these.

    Raises:
        TypeError: something else.
    """
    return Order(ranges_of(things, "order"))


def ranges_of(things: Any, caller: str) -> Sequence[tuple[int, Range]]:
    """(device ordinal, range) of a tensor, of a module's parameters and buffers, or of what a list of these holds: in
    their order, each once. A CPU tensor is on 0. Those of an Order are known.

    Raises:
        TypeError: something else; `caller` is who says so.
    """
    if isinstance(things, Order):
        return things.ranges
    walk = TensorWalk(caller, with_gradients=False)
    found: dict[tuple[int, Range], None] = {}
    for thing in things if isinstance(things, list | tuple) else (things,):
        for tensor in (thing,) if walk.is_plain(thing) else walk.walk(thing):
            reached = range_of(tensor)
            if reached is not None:
                found[max(tensor.get_device(), 0), reached] = None
    return list(found)
