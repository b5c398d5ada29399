"""Optimizer states that leave the device where memory stays short without them.

While LMS is on, `step` of every torch optimizer runs inside a `with`. torch's own hooks around a step would not do:
where the step raises, torch calls no hook at its end.

A step that may make states does so in a region of its own, which overflows to the host. Later steps of torch's own
optimizers let what lies on the host pass through the device in pieces (streaming/optimizer_step.py). For other
optimizers, states come back before a step as far as the device has room. After it, as much leaves as plans say, or as
the time between two steps was short of. The parts of a step inside a backward (streaming/backward_steps.py) move none.
csrc/torch/lms/optimizer_states.h has the moves themselves.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ebbtide import _core
from ebbtide.errors import StateError
from ebbtide.lms import devices, weights
from ebbtide.lms.loaded_states import LoadedStates
from ebbtide.lms.streaming import counting, optimizer_step
from ebbtide.lms.streaming.host_ranges import STATES as TAG
from ebbtide.lms.streaming.host_ranges import HostRanges
from ebbtide.saver.operations.trim import trim_quietly
from ebbtide.saver.pools import backends, captures
from ebbtide.saver.reclaim import spilled
from ebbtide.saver.regions.region import region
from ebbtide.saver.tensors.walk import why_without_memory

_MARK = "_ebbtide_moves_states"


class _Shortage:
    """What earlier steps were short of, in bytes, under the present limit and plan."""

    def __init__(self) -> None:
        self.planned = 0  # what plans have on the host
        self.between_steps = 0  # leaves after each step, if plans have less on the host
        self.in_steps = 0  # stays free when states come back for a step
        self.seen = 0  # the short_bytes of the extension's statistics that are included already


class _State:
    def __init__(self) -> None:
        self.extension: Any = None  # None: LMS is off
        self.device: devices.Device | None = None  # while there is an extension
        self.shortage = _Shortage()
        self.loaded = LoadedStates(TAG)
        # Whose first step made no state, as of SGD without momentum. If a later one does, `loaded` takes it over.
        self.stateless: weakref.WeakSet[Any] = weakref.WeakSet()
        self.callers: weakref.WeakSet[Any] = weakref.WeakSet()  # whose steps have called those of others
        self.wrapped: list[_Wrapped] = []


class _Outer:
    """The step of an optimizer that holds others, which it may call."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.calls_others = optimizer, False


class _Outers(threading.local):
    """Those that the thread is in, the outermost first."""

    def __init__(self) -> None:
        self.open: list[_Outer] = []


_now = _State()
_outers = _Outers()


def install(extension: Any, device: devices.Device) -> None:
    """Moves states from now on. `extension` is the module `_lms`."""
    from torch.optim import Optimizer

    _trim()  # what an earlier LMS left, and nothing uses
    _now.device = device
    _now.shortage = _Shortage()
    extension.forget_planned_states()
    extension.allow_state_moves(True)
    _now.extension = extension
    counting.reset()
    _wrap_tree(Optimizer)
    _wrap_loading()
    if "__init_subclass__" not in vars(Optimizer):
        Optimizer.__init_subclass__ = classmethod(_on_new_class)


def remove(extension: Any) -> None:
    """Ends `install`. States come back as far as there is room; the others stay on the host, where they can be read.
    Every step can be done again.
    """
    from torch.optim import Optimizer

    _now.extension = None
    hook = vars(Optimizer).get("__init_subclass__")
    if getattr(hook, "__func__", None) is _on_new_class:
        del Optimizer.__init_subclass__
    while _now.wrapped:
        _now.wrapped[-1].take_away()
        _now.wrapped.pop()
    if extension.state_host_bytes() > 0:
        _release_free()
        extension.bring_states_back(_core.UNLIMITED)
    extension.allow_state_moves(False)


def forget_shortage() -> None:
    """Under a new limit, memory is short of something else."""
    _now.shortage = _Shortage()
    if _now.extension is not None:
        _now.shortage.seen = _now.extension.state_statistics()["short_bytes"]
        _now.extension.forget_planned_states()


# --- which steps ---


def _wrap_tree(owner: Any) -> None:
    _wrap(owner)
    for subclass in owner.__subclasses__():
        _wrap_tree(subclass)


def _on_new_class(owner: type, /, **options: Any) -> None:
    from torch.optim import Optimizer

    super(Optimizer, owner).__init_subclass__(**options)
    _wrap(owner)


def _wrap(owner: type) -> None:
    plain = vars(owner).get("step")
    if not callable(plain):
        return
    # torch wraps `step` when it first makes an optimizer of the class, and others keep what it made: a learning rate
    # scheduler calls that from then on. So what torch's wrapper calls is replaced, where there is one.
    cell = optimizer_step.cell_of_torchs_wrapper(plain)
    inner = plain if cell is None else cell.cell_contents
    if hasattr(inner, _MARK):  # torch's wrapper copies the mark
        return
    can_stream = optimizer_step.is_torchs_step(inner)

    @functools.wraps(inner)
    def guarded(*arguments: Any, **options: Any) -> Any:
        extension = _now.extension
        is_off = extension is None or backends.is_forked_child()
        if is_off or not optimizer_step.outside_compilation(_counts)(extension, arguments[0]):
            return inner(*arguments, **options)
        return _run_step(extension, inner, arguments, options, can_stream)

    setattr(guarded, _MARK, True)
    _now.wrapped.append(_Wrapped(owner, cell, inner, guarded))
    _now.wrapped[-1].put()


def _counts(extension: Any, optimizer: Any) -> bool:
    """Whether it is a step with memory, and no part of another step: a class calls the step of its base, and a closure
    what it likes. But the step of an optimizer that another one holds, as Accelerate's wrapper does, counts by itself.
    """
    if not extension.is_in_step():
        return not _lacks_memory(optimizer)
    if not _outers.open or any(outer.optimizer is optimizer for outer in _outers.open):
        return False
    _outers.open[-1].calls_others = True
    return True


def _lacks_memory(optimizer: Any) -> bool:
    """Whether no parameter has any, as where a program estimates how much it would take."""
    return all(why_without_memory(each) is not None for group in optimizer.param_groups for each in group["params"])


def _holds_others(optimizer: Any) -> bool:
    from torch.optim import Optimizer

    found = list(vars(optimizer).values())
    for each in vars(optimizer).values():
        if isinstance(each, (list, tuple)):
            found += each
        elif type(each) is dict:
            found += each.values()
    return any(isinstance(each, Optimizer) and each is not optimizer for each in found)


def _wrap_loading() -> None:
    """What `load_state_dict` copies to the device are states. Those that find no room there lie on the host."""
    from torch.optim import Optimizer

    plain = Optimizer.load_state_dict

    @functools.wraps(plain)
    def guarded(*arguments: Any, **options: Any) -> Any:
        is_off = _now.extension is None or backends.is_forked_child()
        if is_off or captures.is_capturing() or not _is_outside_regions():
            return plain(*arguments, **options)
        with _device().making(), region(TAG, overflow="split"):
            result = plain(*arguments, **options)
        _trim()
        return result

    _now.wrapped.append(_Wrapped(Optimizer, None, plain, guarded, "load_state_dict"))
    _now.wrapped[-1].put()


class _Wrapped:
    """A method that was replaced: that of a class, or what torch's wrapper of its `step` calls."""

    def __init__(self, owner: type, cell: Any, plain: Any, guarded: Any, name: str = "step") -> None:
        self._owner, self._cell, self._plain, self._guarded, self._name = owner, cell, plain, guarded, name

    def put(self) -> None:
        if self._cell is None:
            setattr(self._owner, self._name, self._guarded)
        else:
            self._cell.cell_contents = self._guarded

    def take_away(self) -> None:
        """Where torch has wrapped it since, it stays and does nothing."""
        if self._cell is not None:
            self._cell.cell_contents = self._plain
        elif vars(self._owner).get(self._name) is self._guarded:
            setattr(self._owner, self._name, self._plain)


# --- one step ---


def _run_step(
    extension: Any, plain: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any], can_stream: bool
) -> Any:
    optimizer = arguments[0]
    if can_stream or not _holds_others(optimizer):
        return _run_own_step(extension, plain, arguments, options, can_stream)
    outer = _Outer(optimizer)
    _outers.open.append(outer)
    try:
        return _run_own_step(extension, plain, arguments, options, can_stream, outer)
    finally:
        _outers.open.remove(outer)
        if outer.calls_others:
            _now.callers.add(optimizer)


def _run_own_step(
    extension: Any,
    plain: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    can_stream: bool,
    outer: _Outer | None = None,
) -> Any:
    """outer: it may call the steps of others. Those see to their states and weights themselves."""
    optimizer, *others = arguments
    closure = others[0] if others else options.get("closure")
    streams = can_stream and not callable(closure) and optimizer_step.is_possible(optimizer)
    is_part = optimizer_step.is_part()
    with extension.Step():
        optimizer_step.outside_compilation(_now.loaded.adopt)(optimizer, _device(), extension)
        short_before = extension.state_statistics()["step_short_bytes"]
        if optimizer not in _now.callers and not is_part:
            _before_step(extension, callable(closure), streams)
        result = None
        if makes_states := _may_make_states(optimizer, callable(closure)):
            # Around such a step torch's cache is emptied, which waits for the device.
            if callable(closure):
                inner = _outside_region(closure)
                others, options = ([inner, *others[1:]], options) if others else ([], {**options, "closure": inner})
            with _device().making(), region(TAG, overflow="split"):
                result = plain(optimizer, *others, **options)
            if not any(map(_has_state, optimizer.state.values())):
                _now.stateless.add(optimizer)
            if optimizer_step.is_in_backward():
                extension.disturb_step()  # whose demand has grown within it
        elif streams and (hosted := HostRanges.now()) is not None:
            if not optimizer_step.run(plain, optimizer, _device(), hosted):
                extension.count_slow_read()
        else:
            is_away = extension.state_host_bytes() > 0
            result = plain(*arguments, **options)
            calls_others = optimizer in _now.callers or (outer is not None and outer.calls_others)
            if is_away and not calls_others:
                extension.count_slow_read()
        _now.shortage.in_steps += extension.state_statistics()["step_short_bytes"] - short_before
        if makes_states:
            _trim()
        if not is_part:
            _send_states_away(extension)
    weights.release_gone()
    return result


def _before_step(extension: Any, has_closure: bool, streams: bool) -> None:
    devices.release_dead_overflow()
    _bring_states_back(extension, has_closure, streams)
    # Gradients on the host pass through the device in a step in pieces, and the next ones go there as well.
    away = extension.weights_host_bytes() if streams else extension.weight_statistics()["weight_host_bytes"]
    if not has_closure and away > 0:
        _device().trim()
        extension.bring_weights_back(_core.UNLIMITED, not streams)


def _bring_states_back(extension: Any, has_closure: bool, streams: bool) -> None:
    shortage, away = _now.shortage, extension.state_host_bytes()
    if not away:
        return
    short = extension.state_statistics()["short_bytes"]
    if shortage.between_steps or short > shortage.seen:
        shortage.between_steps, shortage.seen = away, short
    if has_closure:  # whose activations would want the room
        return
    stays = _leaving(extension) if streams else 0  # would leave again
    if stays >= away:
        return
    _release_free()
    rooms = [_core.query_device(number).room_bytes for number in range(_core.device_count())]
    allowed = max(0, min(rooms) - shortage.in_steps) if shortage.in_steps else _core.UNLIMITED
    extension.bring_states_back(min(allowed, away - stays))


def _leaving(extension: Any) -> int:
    """What is to be on the host between steps: another plan is followed, whatever was short before it."""
    shortage = _now.shortage
    planned = extension.planned_state_bytes() or 0
    if planned != shortage.planned:
        shortage.planned, shortage.between_steps = planned, 0
    return max(planned, shortage.between_steps)


def _send_states_away(extension: Any) -> None:
    if (wanted := _leaving(extension) - extension.state_host_bytes()) > 0:
        extension.send_states_away(wanted)


def _trim() -> None:
    """Releases memory of the tag that nothing uses."""
    with contextlib.suppress(StateError):  # a region of the tag is open in another thread
        trim_quietly([TAG], missing_ok=True)


def _device() -> devices.Device:
    assert _now.device is not None
    return _now.device


def _release_free() -> None:
    _device().trim()
    spilled.release_free(TAG)


def _may_make_states(optimizer: Any, has_closure: bool) -> bool:
    """Whether a parameter has no state yet, and the thread is in no region of the program's, whose tag it would get. In
    a capture of a GPU's graph they stay ordinary.
    """
    states = optimizer.state
    if captures.is_capturing() or (optimizer in _now.stateless and not any(map(_has_state, states.values()))):
        return False
    import torch

    return _is_outside_regions() and any(
        (has_closure or parameter.grad is not None) and not _has_state(states.get(parameter))
        for group in optimizer.param_groups
        if type(optimizer) is not torch.optim.SGD or group["momentum"]  # else it has none
        for parameter in group["params"]
    )


def _is_outside_regions() -> bool:
    """Whether the thread is in none of the program's."""
    import torch

    backend = backends.existing_backend()
    return backend is not None and _device().is_ordinary(torch.empty(1, device=backend.device_type))


def _has_state(entry: Any) -> bool:
    """Of a parameter's entry in `optimizer.state`, which is a dict in torch's own optimizers, and may be empty. Others
    keep a tensor there, whose truth would be that of its elements.
    """
    return len(entry) > 0 if isinstance(entry, dict) else entry is not None


def _outside_region(closure: Callable[[], Any]) -> Callable[[], Any]:
    """What a closure allocates is no state: it runs forward and backward."""

    @functools.wraps(closure)
    def outside() -> Any:
        with _device().ordinary():
            return closure()

    return outside
