"""Optimizer states that were made outside a step that makes them: by `load_state_dict`, by the optimizer's `__init__`,
or in a later step than the others. They get memory of the tag of states before the next step.

To look at every state before every step would take too long. So one of them stands for all, until there are more.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ebbtide.errors import StateError
from ebbtide.lms import devices
from ebbtide.saver.adoption.adopt import adopt_quietly, storage_to_move
from ebbtide.saver.pools import backends
from ebbtide.saver.tensors.walk import TensorWalk

if TYPE_CHECKING:
    import torch


class _Seen:
    """Of one optimizer, when its states were adopted, or could not be."""

    def __init__(self, count: int, first: "torch.Tensor") -> None:
        self._count, self._first, self._address = count, weakref.ref(first), first.data_ptr()

    def holds(self, count: int, first: "torch.Tensor") -> bool:
        """Whether they are still those."""
        return (self._count, self._address) == (count, first.data_ptr()) and self._first() is first


class LoadedStates:
    """Gives such states memory of a tag."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._seen: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()

    def adopt(self, optimizer: Any, device: devices.Device) -> None:
        """What cannot move, or finds no room, stays, and is not tried again."""
        import torch

        states = [state for state in optimizer.state.values() if isinstance(state, dict)]
        count = sum(map(len, states))
        first = next(_movable(states), None)
        seen = self._seen.get(optimizer)
        if first is None or (seen is not None and seen.holds(count, first)):
            return
        tensors = list(_movable(states))
        ordinary = list(filter(device.is_ordinary, tensors))
        if ordinary:
            with contextlib.suppress(StateError, torch.OutOfMemoryError), device.making():
                adopt_quietly(ordinary, tag=self._tag)
        self._seen[optimizer] = _Seen(count, first)


def _movable(states: "list[dict[str, Any]]") -> "Iterator[torch.Tensor]":
    """The tensors with memory of their own on the device, also inside wrappers such as a DTensor. Most optimizers count
    their steps in a tensor on the CPU. Sparse states, whose parts are other tensors at each look, stay.
    """
    import torch

    backend = backends.existing_backend()
    assert backend is not None
    kind = backend.device_type
    walk = TensorWalk("large model support", with_gradients=False)
    for state in states:
        for found in walk.find(state):
            if found.owner.layout is torch.strided and storage_to_move(found.tensor, kind)[1] is not None:
                yield found.tensor
