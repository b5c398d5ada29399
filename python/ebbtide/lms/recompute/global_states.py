"""torch's state beside tensors: the generators of random numbers, and the settings that decide which kernels run.

A checkpoint brings back autocast and torch's random numbers. The settings are brought back here: a program that chooses
a backend of attention for its forward, say, has left that `with` when backward begins.
"""

import contextlib
import ctypes
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

from ebbtide.torch_support.torch_names import find

_HEADER_BYTES = object.__basicsize__  # of an object, with the count of its references

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


def of_device(device: Any) -> Any:
    """The state of torch's own generator of one device."""
    import torch

    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


class OtherRandomStates:
    """Python's and NumPy's own generators, at construction.

    Other threads draw from them, too: who set them back would make those draw the same numbers twice.
    """

    def __init__(self) -> None:
        self._python, self._numpy = _of_python.state(), _of_numpy.state()

    def have_moved(self) -> bool:
        """Whether this thread or another one has drawn. Importing NumPy is no draw."""
        moved_numpy = self._numpy is not None and not _are_equal(_of_numpy.state(), self._numpy)
        return moved_numpy or _of_python.state() != self._python

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


class _Generator:
    """A generator whose state takes long to read (NumPy's 60 us). It is read again where its memory has changed.

    Args:
        read: its state; None: there is none.
        memory: what differs wherever the state does. None: nothing is known to.
    """

    def __init__(self, read: Callable[[], Any], memory: Callable[[], Any]) -> None:
        self._read, self._memory = read, memory
        self._latest: tuple[Any, Any] | None = None  # memory and state

    def state(self) -> Any:
        memory = self._memory()
        if self._latest is not None and memory is not None and memory == self._latest[0]:
            return self._latest[1]
        state = self._read()
        if memory == self._memory():  # no other thread has drawn meanwhile
            self._latest = memory, state
        return state


def _bytes_of(one: Any, layout: type) -> bytes:
    """The memory of an object behind its header, as far as this class, which is of C, lays it out."""
    return ctypes.string_at(id(one) + _HEADER_BYTES, layout.__basicsize__ - _HEADER_BYTES)


def _memory_of_python() -> Any:
    generator: Any = getattr(random.getstate, "__self__", None)
    if sys.implementation.name != "cpython" or type(generator) is not random.Random:
        return None
    layout: Any = random.Random.__base__
    return _bytes_of(generator, layout), vars(generator)["gauss_next"]


_MT19937_BYTES = 625 * 4  # 624 words and a position


def _memory_of_numpy() -> Any:
    numpy: Any = sys.modules.get("numpy.random")
    if sys.implementation.name != "cpython" or not hasattr(numpy, "get_bit_generator"):
        return None
    bits, around = numpy.get_bit_generator(), getattr(numpy.get_state, "__self__", None)
    # The program may have put those of another one in their place.
    are_its_own = around is getattr(numpy.set_state, "__self__", None)
    if type(bits) is not numpy.MT19937 or type(around) is not numpy.RandomState or not are_its_own:
        return None
    # A second number of the normal distribution waits in the object around it.
    return ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES), _bytes_of(around, numpy.RandomState)


def _python_state() -> Any:
    return random.getstate()  # whose it is may change


def _numpy_state() -> Any:
    numpy: Any = sys.modules.get("numpy.random")
    return None if numpy is None else numpy.get_state(legacy=False)


def _are_equal(one: Any, other: Any) -> bool:
    """Of NumPy's states: dicts with arrays in them."""
    if one is other:
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[name], other[name]) for name in one)
    return bool(one.tobytes() == other.tobytes()) if hasattr(one, "tobytes") else bool(one == other)


_of_python = _Generator(_python_state, _memory_of_python)
_of_numpy = _Generator(_numpy_state, _memory_of_numpy)


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

    _latest: ClassVar["Switches | None"] = None

    def __init__(self) -> None:
        self._values = [_read(switch) for switch in _switches()]

    @classmethod
    def now(cls) -> "Switches":
        """The same object as long as the settings are the same: each call that is made again keeps one."""
        latest, now = cls._latest, cls()
        if latest is None or latest._values != now._values:
            cls._latest = latest = now
        return latest

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Sets those that are different now, and sets them back at the end: a second run ends early, perhaps between
        two settings of its own.
        """
        now = Switches.now()
        if now is not self:
            self._write()
        try:
            yield
        finally:
            now._write()

    def _write(self) -> None:
        for switch, value in zip(_switches(), self._values, strict=True):
            if value is not None and _read(switch) != value:
                switch.write(value)
