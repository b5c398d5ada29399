"""A step of an optimizer whose states, weights or gradients lie on the host: they pass through the device in pieces.

While the kernels of one piece run, the next one is copied in and the last one out, in streams of their own. So the bus
works in both directions at once, and each byte crosses it once each way, whatever the optimizer reads and writes.
Nothing moves for good: addresses stay, and between two steps everything is where it was.

That is possible for torch's own optimizers that compute each element from the same element of the parameter, the
gradient and the states. Then a step over slices is the step over the whole, bit for bit.
"""

import contextlib
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from ebbtide import _core
from ebbtide.lms.streaming.counting import count
from ebbtide.lms.streaming.device import Device
from ebbtide.lms.streaming.host_ranges import HostRanges
from ebbtide.lms.streaming.step_copies import Joined, Staging
from ebbtide.lms.streaming.step_parts import Chunk, Undivided, divide
from ebbtide.saver.pools import captures
from ebbtide.torch_support.torch_names import find

# A slot is at most this part of the limit.
_LIMIT_PARTS = 64
_MOST_SLOT_BYTES, _LEAST_SLOT_BYTES = 128 << 20, 1 << 20
_ELEMENTWISE = (
    *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)

_outside: dict[Callable[..., Any], Callable[..., Any]] = {}  # what outside_compilation made of each function


def is_torchs_step(function: Any) -> bool:
    """Whether it is the function that torch has for a class of its own, without anybody's wrapper."""
    from torch.optim import optimizer

    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == optimizer.__file__ and not hasattr(function, "hooked")


def cell_of_torchs_wrapper(function: Any) -> Any:
    """Of the function that torch's wrapper of `step` calls between its hooks; None where that is no such wrapper."""
    from torch.optim import Optimizer

    code = getattr(function, "__code__", None)
    if code is not Optimizer.profile_hook_step(is_possible).__code__ or "func" not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index("func")]


def inner_step(owner: Any) -> Callable[..., Any]:
    """What torch's wrapper of a class's `step` calls. While LMS is on, that is LMS's function."""
    cell = cell_of_torchs_wrapper(owner.step)
    found: Callable[..., Any] = owner.step if cell is None else cell.cell_contents
    return found


def is_possible(optimizer: Any) -> bool:
    """Whether a step of this optimizer may run in pieces: one of torch's own that works element by element."""
    import torch

    kinds = {getattr(torch.optim, name) for name in _ELEMENTWISE}
    return (
        type(optimizer) in kinds
        and not any(group.get("differentiable") for group in optimizer.param_groups)
        and not captures.is_capturing()
    )


def is_in_backward() -> bool:
    """Whether a hook of a backward has called it."""
    return int(find("_C._current_graph_task_id")()) != -1


def run(plain: Callable[..., Any], optimizer: Any, device: Device, hosted: HostRanges) -> bool:
    """Runs a step without a closure, all of whose parameters have their states.

    Args:
        plain: the function of torch that does a step, given an optimizer.
        device: the kind of device of the parameters.
        hosted: what is on the host.

    Returns:
        Whether there was room for copies. If not, the step has used the host's memory over the bus.
    """
    return outside_compilation(_run)(plain, optimizer, device, hosted)


class _Thread(threading.local):
    """What it is in."""

    is_part = False
    staging: Staging | None = None


_thread = _Thread()


class Part(_core.Scope):
    """Steps in here are parts of one, which has an end of its own. So they move nothing for good.

    staging: leave their copies under way, for somebody else to join; None: join them.
    """

    def __init__(self, staging: Staging | None) -> None:
        self._inside = True, staging
        self._before = _thread.is_part, _thread.staging

    def _open(self) -> None:
        _thread.is_part, _thread.staging = self._inside

    def _close(self) -> None:
        _thread.is_part, _thread.staging = self._before


def is_part() -> bool:
    """Whether the thread is in a `Part`."""
    return _thread.is_part


def _run(plain: Callable[..., Any], optimizer: Any, device: Device, hosted: HostRanges) -> bool:
    import torch

    kept = _thread.staging
    staging = Staging() if kept is None else kept
    copied_bytes = staging.copied_bytes
    if not staging.slot_bytes:
        most_bytes = max(_LEAST_SLOT_BYTES, device.allowed_bytes() // _LIMIT_PARTS)
        staging.slot_bytes = min(_MOST_SLOT_BYTES, most_bytes)
    with torch.no_grad(), Joined(staging) if kept is None else contextlib.nullcontext():
        _Step(plain, optimizer, device, staging).run(divide(optimizer, hosted, staging.slot_bytes))
    count(staging.copied_bytes - copied_bytes)
    return not staging.is_short


class _Step:
    """One step."""

    def __init__(self, plain: Callable[..., Any], optimizer: Any, device: Device, staging: Staging) -> None:
        self._plain, self._optimizer, self._device, self._staging = plain, optimizer, device, staging

    def run(self, parts: Iterator[Chunk | Undivided]) -> None:
        """Each is on its way while the one before is computed."""
        part = self.begin(parts)
        while part is not None:
            following = self.begin(parts)
            self.compute(part)
            part = following

    def begin(self, parts: Iterator[Chunk | Undivided]) -> Chunk | Undivided | None:
        """The next one, whose copy has begun."""
        part = next(parts, None)
        if isinstance(part, Chunk):
            lane = self._staging.lane_of(part.device, self._device)
            if lane is not None:
                lane.copy_in(part)
            else:
                part.stay()
        return part

    def compute(self, part: Chunk | Undivided) -> None:
        """Its part of the step; its copy back has begun then."""
        if isinstance(part, Undivided):
            self._plain(view_of(self._optimizer, part.group, part.parameters, self._optimizer.state))
        else:
            self._compute_chunk(part)

    def _compute_chunk(self, chunk: Chunk) -> None:
        lane = self._staging.lane_of(chunk.device, self._device)
        if lane is not None:
            lane.await_copy_in(chunk)
        states = defaultdict(dict, {piece.parameter: piece.state for piece in chunk.pieces})
        try:
            self._plain(view_of(self._optimizer, chunk.group, [piece.parameter for piece in chunk.pieces], states))
        finally:  # as without pieces: an error leaves what was done so far
            for piece in chunk.pieces:
                piece.keep_state()
            if lane is not None:
                lane.copy_out(chunk)


def outside_compilation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Under torch.compile a step would be compiled anew for each piece, and our functions with it. Also where it is not
    compiling now: what a frame calls that it could not compile. Each of our few functions is wrapped once, since that
    takes longer than a call.
    """
    if "torch._dynamo" not in sys.modules:
        return function
    if function not in _outside:
        import torch

        _outside[function] = torch.compiler.disable(function)
    return _outside[function]


def view_of(optimizer: Any, group: dict[str, Any], parameters: list[Any], states: Any) -> Any:
    """The same optimizer with these parameters alone."""
    view = object.__new__(type(optimizer))
    vars(view).update(vars(optimizer))
    view.param_groups = [{**group, "params": parameters}]
    view.state = states
    return view
