"""Optimizer states that were made outside a step that makes them: by `load_state_dict`, by the optimizer's `__init__`,
or in a later step than the others. They get memory of the tag of states before the next step.

To look at every state before every step would take too long. So one of them stands for all, until there are more.
"""

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from ebbtide import _core
from ebbtide.errors import StateError
from ebbtide.lms import devices, outside
from ebbtide.saver.adoption.adopt import NOT_OWN, adopt_quietly, storage_to_move
from ebbtide.saver.pools import backends
from ebbtide.saver.regions.region import region
from ebbtide.saver.tensors.walk import TensorWalk

if TYPE_CHECKING:
    import torch

_States: TypeAlias = list[dict[str, Any]]


class _Seen:
    """Of one optimizer, when its states were adopted, or could not be."""

    def __init__(self, count: int, states: "_States", may_change: bool) -> None:
        self._count, self._may_change = count, may_change
        movable = next(_movable(states), None)
        self._find = _tensors if movable is None else _movable  # where nothing can move, any one stands for all
        self._address = None if movable is None else movable.data_ptr()
        first = next(self._find(states), None)
        self._first = None if first is None else weakref.ref(first)

    def holds(self, count: int, states: "_States") -> bool:
        """Whether they are still those."""
        if count != self._count or self._may_change:
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

    def adopt(self, optimizer: Any, device: devices.Device, extension: Any) -> None:
        """What cannot move, or finds no room, stays, and is not tried again. But memory that `torch.load` made on the
        simulated device cannot move, and a copy takes its place once nothing else refers to it.
        """
        import torch

        states = [state for state in optimizer.state.values() if isinstance(state, dict)]
        count = sum(map(len, states))
        seen = self._seen.get(optimizer)
        if not count or (seen is not None and seen.holds(count, states)):
            return
        loaded = [(state, name) for state in states for name in state if _is_loaded(state[name], device, extension)]
        unshared = [(state, name) for state, name in loaded if _is_unshared(state, name)]
        self._copy(unshared)
        tensors = list(_movable(states))
        ordinary = list(filter(device.is_ordinary, tensors))
        if ordinary:
            with contextlib.suppress(StateError, torch.OutOfMemoryError), device.making():
                adopt_quietly(ordinary, tag=self._tag)
        self._seen[optimizer] = _Seen(count, states, may_change=len(unshared) < len(loaded))
        outside.note(extension, outside.STATES, optimizer, self._outside(states))

    def _copy(self, entries: list[tuple[dict[str, Any], str]]) -> None:
        import torch

        if entries:
            with contextlib.suppress(StateError, torch.OutOfMemoryError), torch.no_grad():
                with region(self._tag, overflow="split"):
                    for state, name in entries:
                        state[name] = state[name].clone().requires_grad_(state[name].requires_grad)

    def _outside(self, states: "_States") -> Counter[str]:
        """How many bytes stay, by reason."""
        sizes: Counter[str] = Counter()
        for value in _tensors(states):
            reason, storage = storage_to_move(value, _device_type())
            if storage is None and reason != NOT_OWN:
                continue
            info = _core.find(value.data_ptr())
            if info is None and _device_type() == "cpu":  # on the simulated device, memory of the host
                continue
            if info is None or info.tag == devices.TAG:
                sizes[outside.NOT_OWN if reason else outside.NO_ROOM] += value.nbytes
            elif info.tag != self._tag:
                sizes[f"they have the tag {info.tag!r}"] += value.nbytes
        return sizes


def _device_type() -> str:
    backend = backends.existing_backend()
    assert backend is not None
    return backend.device_type


def _is_loaded(value: Any, device: devices.Device, extension: Any) -> bool:
    """Whether it has memory that `torch.load` made on the simulated device."""
    import torch

    cannot_move = type(value) is torch.Tensor and storage_to_move(value, _device_type())[0] == NOT_OWN
    return cannot_move and device.is_ordinary(value) and extension.owns_memory(value)


def _is_unshared(state: dict[str, Any], name: str) -> bool:
    """Whether nothing but the entry refers to the tensor, and nothing else to its memory."""
    import torch

    probe = {name: torch.empty(1)}
    return _count_owners(probe, name) == _count_owners(state, name) and not vars(state[name])


def _count_owners(state: dict[str, Any], name: str) -> tuple[int, int, int]:
    import torch

    storage = state[name].untyped_storage()
    return sys.getrefcount(state[name]), state[name]._use_count(), torch._C._storage_Use_Count(storage._cdata)


def _tensors(states: "_States") -> "Iterator[torch.Tensor]":
    import torch

    return (value for state in states for value in state.values() if isinstance(value, torch.Tensor))


def _movable(states: "_States") -> "Iterator[torch.Tensor]":
    """The tensors with memory of their own on the device, also inside wrappers such as a DTensor. Most optimizers count
    their steps in a tensor on the CPU. Sparse states stay, whose parts are other tensors at each look, and what things
    hold that a state refers to: it may be a parameter.
    """
    import torch

    kind = _device_type()
    walk = TensorWalk("large model support", with_gradients=False)
    for value in _tensors(states):
        if value.device.type == kind and value.layout is torch.strided and not isinstance(value, torch.nn.Parameter):
            for part in (value,) if type(value) is torch.Tensor else walk.walk(value):
                if part.numel() > 0 and storage_to_move(part, kind)[1] is not None:
                    yield part
