"""torch's state beside tensors: the generators of random numbers, and the settings that decide which kernels run.

A checkpoint brings back autocast and the random numbers. The settings are brought back here: a program that chooses a
backend of attention for its forward, say, has left that `with` when backward begins.
"""

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ebbtide.torch_support.torch_names import find

# --- random numbers ---


class RandomStates:
    """The generators of torch, of the CPU and of the devices that tensors are on, at construction."""

    def __init__(self, tensors: list[Any]) -> None:
        import torch

        devices = sorted({tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}, key=str)
        self._cpu = torch.get_rng_state()
        self._devices = [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]

    def restore(self) -> None:
        import torch

        torch.set_rng_state(self._cpu)
        for device, state in self._devices:
            torch.get_device_module(device).set_rng_state(state, device)


class OtherRandomStates:
    """Python's and NumPy's own generators, at construction.

    Other threads draw from them, too: who set them back would make those draw the same numbers twice.
    """

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), _numpy_state()

    def have_moved(self) -> bool:
        """Whether this thread or another one has drawn. Importing NumPy is no draw."""
        moved_numpy = self._numpy is not None and not _are_equal(_numpy_state(), self._numpy)
        return moved_numpy or random.getstate() != self._python

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draws the same numbers inside, and goes on afterwards where they are now."""
        now = OtherRandomStates()
        self._set()
        try:
            yield
        finally:
            now._set()

    def _set(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


def _numpy_state() -> Any:
    numpy: Any = sys.modules.get("numpy.random")
    return None if numpy is None else numpy.get_state()


def _are_equal(one: Any, other: Any) -> bool:
    """Of NumPy's states, whose second entry is an array."""
    return one[0] == other[0] and one[1].tobytes() == other[1].tobytes() and one[2:] == other[2:]


def of_device(device: Any) -> Any:
    """The state of torch's own generator of one device."""
    import torch

    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


# --- settings ---


class _Switch(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], None]


def _attribute(owner: Any, name: str) -> _Switch:
    return _Switch(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _are_deterministic() -> tuple[bool, bool]:
    import torch

    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    import torch

    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


@functools.cache
def _switches() -> list[_Switch]:
    """Those that older names set come first: they set newer ones along."""
    import torch

    backends, cuda = torch.backends, torch.backends.cuda
    found = [
        _Switch(torch.get_default_dtype, torch.set_default_dtype),
        _Switch(_are_deterministic, _set_deterministic),
        _Switch(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        *(_attribute(backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
        *(
            _attribute(owner, "fp32_precision")
            for owner in (
                *(backends, cuda.matmul, backends.cudnn, backends.cudnn.conv, backends.cudnn.rnn),
                *(backends.mkldnn, backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn),
            )
        ),
        _attribute(cuda.matmul, "allow_fp16_accumulation"),
        _attribute(cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        _attribute(cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        _Switch(cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        _Switch(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        _Switch(cuda.math_sdp_enabled, cuda.enable_math_sdp),
        _Switch(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        _Switch(cuda.fp16_bf16_reduction_math_sdp_allowed, cuda.allow_fp16_bf16_reduction_math_sdp),
        _Switch(find("_C._get_sdp_priority_order"), find("_C._set_sdp_priority_order")),
    ]
    return [switch for switch in found if _read(switch) is not None]


def _read(switch: _Switch) -> Any:
    """None where this build of torch has no such setting, or where the program mixes the older and the newer names of
    TF32: then torch refuses to read the older ones.
    """
    try:
        return switch.read()
    except (RuntimeError, AttributeError):
        return None


class Switches:
    """The settings, as they are at construction."""

    def __init__(self) -> None:
        self._values = [_read(switch) for switch in _switches()]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Sets those that are different now, and sets them back at the end."""
        now = Switches()
        if now._values != self._values:
            self._write()
        try:
            yield
        finally:
            now._write()

    def _write(self) -> None:
        for switch, value in zip(_switches(), self._values, strict=True):
            if value is not None and _read(switch) != value:
                switch.write(value)
