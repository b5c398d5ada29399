"""Optimizer states that were made outside a step that makes them: by `load_state_dict`, by the optimizer's `__init__`,
or in a later step than the others. They get memory of the tag of states before the next step.

To look at every state before every step would take too long. So one of them stands for all, until there are more.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from ebbtide.errors import StateError
from ebbtide.lms import devices
from ebbtide.saver.adoption.adopt import adopt_quietly, storage_to_move
from ebbtide.saver.pools import backends
from ebbtide.saver.tensors.walk import TensorWalk

if TYPE_CHECKING:
    import torch

_States: TypeAlias = list[dict[str, Any]]


class _Seen:
    """Of one optimizer, when its states were adopted, or could not be."""

    def __init__(self, count: int, states: "_States") -> None:
        self._count = count
        movable = next(_movable(states), None)
        self._find = _tensors if movable is None else _movable  # where nothing can move, any one stands for all
        self._address = None if movable is None else movable.data_ptr()
        first = next(self._find(states), None)
        self._first = None if first is None else weakref.ref(first)

    def holds(self, count: int, states: "_States") -> bool:
        """Whether they are still those."""
        if count != self._count:
            return False
        first: Any = next(self._find(states), None)
        if first is None or self._first is None:
            return first is self._first
        is_where_it_was = self._address is None or self._address == first.data_ptr()
        return self._first() is first and is_where_it_was


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
        seen = self._seen.get(optimizer)
        if not count or (seen is not None and seen.holds(count, states)):
            return
        tensors = list(_movable(states))
        ordinary = list(filter(device.is_ordinary, tensors))
        if ordinary:
            with contextlib.suppress(StateError, torch.OutOfMemoryError), device.making():
                adopt_quietly(ordinary, tag=self._tag)
        self._seen[optimizer] = _Seen(count, states)


def _tensors(states: "_States") -> "Iterator[torch.Tensor]":
    import torch

    return (value for state in states for value in state.values() if isinstance(value, torch.Tensor))


def _movable(states: "_States") -> "Iterator[torch.Tensor]":
    """The tensors with memory of their own on the device, also inside wrappers such as a DTensor. Most optimizers count
    their steps in a tensor on the CPU. Sparse states stay, whose parts are other tensors at each look, and what things
    hold that a state refers to: it may be a parameter.
    """
    import torch

    backend = backends.existing_backend()
    assert backend is not None
    kind = backend.device_type
    walk = TensorWalk("large model support", with_gradients=False)
    for value in _tensors(states):
        if value.device.type == kind and value.layout is torch.strided and not isinstance(value, torch.nn.Parameter):
            for part in (value,) if type(value) is torch.Tensor else walk.walk(value):
                if part.numel() > 0 and storage_to_move(part, kind)[1] is not None:
                    yield part
