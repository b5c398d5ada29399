"""torch's own layers use a copy of a weight that lies on the host, instead of bringing it back.

In a forward pass without gradients, `Linear` and the convolutions copy such a weight to the device, compute, and let
the copy go, all in the order of the current stream. The weight stays what and where it is, and nothing else refers to
the copy. So each weight on the host crosses the bus once in a pass, nothing is remapped, and no wait is needed.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - TorchScript compiles torch's source with this module's names
from torch import Tensor

from ebbtide.lms.streaming.counting import count
from ebbtide.saver.pools import captures


class Device(Protocol):
    """Of `ebbtide.lms.devices.Device`, what a layer needs."""

    def ordinary(self) -> AbstractContextManager[Any]:
        """What is allocated in here belongs to no tag of the program's."""


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
        count_slow_read: called where there is no room for a copy.
    """

    def __init__(self, device: Device, is_on_host: Callable[[Any], bool], count_slow_read: Callable[[], None]) -> None:
        self._device, self._is_on_host, self._count_slow_read = device, is_on_host, count_slow_read
        self._replaced: dict[Any, tuple[Any, Any]] = {}  # what `forward` was and is

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
        """Whether the module's `forward` is one of these."""
        forward = getattr(type(module), "forward", None)
        return any(forward is ours for _, ours in self._replaced.values()) and "forward" not in vars(module)

    def _make(self, plain: Callable[..., Any], compute: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def forward(self: Any, input: Tensor) -> Any:
            if torch.compiler.is_compiling() or torch.is_grad_enabled():
                return plain(self, input)
            copy = copy_of(self.weight)
            return plain(self, input) if copy is None else compute(self, input, copy)

        def copy_of(weight: Any) -> Any:
            if not self._replaced or not self._is_on_host(weight) or captures.is_capturing():
                return None
            try:
                with self._device.ordinary():
                    copy = weight.detach().clone()
            except torch.OutOfMemoryError:
                self._count_slow_read()
                return None
            count(weight.nbytes)
            return copy

        return forward
