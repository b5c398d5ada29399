"""torch's own layers use a copy of a weight that lies on the host, instead of bringing it back.

In a forward pass without gradients, `Linear` and the convolutions copy such a weight to the device, compute, and let
the copy go. The weight stays what and where it is, and nothing else refers to the copy. So each weight on the host
crosses the bus once in a pass, nothing is remapped, and the program's thread waits for nothing.

On a GPU a layer inside another module has its copy made while the device computes earlier ones (forward_copies.py).
Otherwise it is made in the order of the current stream.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - TorchScript compiles torch's source with this module's names
from torch import Tensor

from ebbtide.lms.streaming.counting import count
from ebbtide.lms.streaming.device import Device
from ebbtide.lms.streaming.forward_copies import Pass, Slot, Writes
from ebbtide.saver.pools import captures


class Uses(Writes, Protocol):
    """Of the extension, what tells of this thread."""

    def module_depth(self) -> int:
        """How many modules it is in."""

    def count_slow_read(self) -> None:
        """A weight is read on the host."""


def _linear(layer: Any, given: Any, weight: Any) -> Any:
    return F.linear(given, weight, layer.bias)


def _convolution(layer: Any, given: Any, weight: Any) -> Any:
    return layer._conv_forward(given, weight, layer.bias)


_LAYERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    torch.nn.Linear: _linear,
    **dict.fromkeys((torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d), _convolution),
}


class Layers:
    """The classes of layers, while their `forward` is replaced.

    Args:
        device: the kind of device of the weights.
        is_on_host: of a parameter, whether it is a weight that lies on the host.
        uses: the extension.
    """

    def __init__(self, device: Device, is_on_host: Callable[[Any], bool], uses: Uses) -> None:
        self._device, self._is_on_host, self._uses = device, is_on_host, uses
        self._replaced: dict[Any, tuple[Any, Any]] = {}  # what `forward` was and is
        self._passes = _Passes()

    def replace(self) -> None:
        """From now on. It can be called again."""
        for kind, compute in _LAYERS.items():
            if kind not in self._replaced:
                plain = kind.forward
                self._replaced[kind] = plain, self._make(plain, compute)
                kind.forward = self._replaced[kind][1]

    def restore(self) -> None:
        """Where another library has replaced it since, it stays and does what torch's does. It can be called again."""
        for kind, (plain, ours) in list(self._replaced.items()):
            if kind.forward is ours:
                kind.forward = plain
            del self._replaced[kind]

    def serve(self, module: Any) -> bool:
        """Whether the module's `forward` is one of these, and its weight a parameter."""
        forward = getattr(type(module), "forward", None)
        is_ours = any(forward is ours for _, ours in self._replaced.values()) and "forward" not in vars(module)
        return is_ours and _weight_of(module) is not None

    def end_pass(self) -> None:
        """The thread has left the outermost module."""
        while self._passes.open:
            self._passes.open.popitem()[1].end()

    def _make(self, plain: Callable[..., Any], compute: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def forward(self: Any, input: Tensor) -> Any:
            if torch.compiler.is_compiling() or torch.is_grad_enabled():
                return plain(self, input)
            return stream(self, input)

        def stream(layer: Any, given: Any) -> Any:
            weight = _weight_of(layer)
            if weight is None or not self._replaced or not self._is_on_host(weight) or captures.is_capturing():
                return plain(layer, given)
            if (begun := self._begin_copy(weight)) is not None:
                a_pass, slot = begun
                try:
                    return compute(layer, given, slot.copy)
                finally:
                    a_pass.release(slot)
            copy = self._copy_at_once(weight)
            return plain(layer, given) if copy is None else compute(layer, given, copy)

        return forward

    def _begin_copy(self, weight: Any) -> tuple[Pass, Slot] | None:
        if weight.device.type != "cuda" or self._uses.module_depth() < 2 or _has_collectives():
            return None
        a_pass = self._passes.open.get(weight.device)
        try:
            if a_pass is None:
                a_pass = self._passes.open[weight.device] = Pass(self._device, weight.device, self._uses)
            slot = a_pass.begin(weight)
        except torch.OutOfMemoryError:
            return None
        if slot is None:
            return None
        count(weight.nbytes)
        return a_pass, slot

    def _copy_at_once(self, weight: Any) -> Any:
        try:
            copy = self._device.optional(weight.detach().clone)
        except torch.OutOfMemoryError:
            self._uses.count_slow_read()
            return None
        count(weight.nbytes)
        return copy


def _weight_of(layer: Any) -> Any:
    """The parameter; None where something computes the weight, each time that it is asked for."""
    return vars(layer).get("_parameters", {}).get("weight")


def _has_collectives() -> bool:
    """Whether weights may come from other processes: a pass may wait for that in the middle, and a copy would not."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


class _Passes(threading.local):
    """Of each thread, those that are under way, by device."""

    def __init__(self) -> None:
        self.open: dict[Any, Pass] = {}
