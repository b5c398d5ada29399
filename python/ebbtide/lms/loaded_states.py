"""Optimizer states that were made outside a step that makes them: by `load_state_dict`, by the optimizer's `__init__`,
or in a later step than the others. They get memory of the tag of states before the next step.

To look at every state before every step would take too long. So one of them stands for all, until there are more.
"""

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from ebbtide.errors import StateError
from ebbtide.lms import devices
from ebbtide.saver.adoption.adopt import adopt_quietly
from ebbtide.saver.pools import backends

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
        first = next(filter(_can_move, (each for state in states for each in state.values())), None)
        seen = self._seen.get(optimizer)
        if first is None or (seen is not None and seen.holds(count, first)):
            return
        tensors = [each for state in states for each in state.values() if _can_move(each)]
        ordinary = list(filter(device.is_ordinary, tensors))
        if ordinary:
            with contextlib.suppress(StateError, torch.OutOfMemoryError), device.making():
                adopt_quietly(ordinary, tag=self._tag)
        self._seen[optimizer] = _Seen(count, first)


def _can_move(value: Any) -> bool:
    """Whether it is a tensor on the device. Most optimizers count their steps in a tensor on the CPU."""
    import torch

    backend = backends.existing_backend()
    assert backend is not None
    return isinstance(value, torch.Tensor) and value.device.type == backend.device_type and value.numel() > 0
