"""A forward pass without gradients whose weights lie on the host: copies of them pass through the device.

As a module is called, its parameters refer to copies on the device, and to their own memory again as it returns. The
copies for the modules that were called next in the pass before are begun ahead, in a stream of their own. So nothing is
remapped, the device is never waited for, and each weight crosses the bus once in a pass.

- A copy is torch's memory. Whoever keeps a view of it beyond the module keeps it alive, as that of any temporary.
- What the module writes reaches the weight: it is copied back, unless the module is one of torch's own without hooks,
  which writes none of its parameters.
- Copies ahead are made only within the call of an outermost module, and hold bytes from after its beginning. What
  others write meanwhile through the parameter itself is noticed by its version.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from ebbtide import _core
from ebbtide.lms.streaming.forward_copies import Lane, make_lane
from ebbtide.lms.streaming.optimizer_step import Device, count
from ebbtide.lms.streaming.step_parts import LEAST_BYTES, is_dense
from ebbtide.locks import make_lock

# Copies have at most this part of the limit, and those that are begun ahead this many bytes.
_LIMIT_PARTS = 8
_MOST_AHEAD_BYTES = 512 << 20
_MOST_MODULES_AHEAD = 8
TAG = "lms.weights"


class _Visit:
    """A parameter and its copy."""

    def __init__(self, parameter: Any, lane: Lane) -> None:
        self.parameter, self.lane = parameter, lane
        self.home = parameter.data
        self.version = parameter._version
        self.size_bytes: int = self.home.nbytes
        self.users = 0
        self.is_written = False  # perhaps
        self.visitor, self.arrived = lane.copy_in(self.home)

    def is_fresh(self) -> bool:
        """Of a copy that was begun ahead: whether the parameter is still what was copied."""
        parameter = self.parameter
        return bool(parameter.data_ptr() == self.home.data_ptr() and parameter._version == self.version)

    def begin(self) -> None:
        self.parameter.data = self.visitor

    def end(self) -> None:
        """The parameter is what it was, or what the module has made of it."""
        parameter = self.parameter
        self.is_written |= parameter._version != self.version
        if parameter.data_ptr() == self.visitor.data_ptr():
            parameter.data = self.home
        self.lane.release(self.home if self.is_written else None, self.visitor)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.open: list[tuple[int, list[_Visit]]] = []  # by module, the outermost first
        self.last: Any = None  # the module that was called last in this pass, weakly


class Forward:
    """The visits of all modules, while LMS is on.

    Args:
        device: the kind of device of the weights.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = make_lock()
        self._thread = _Thread()
        self._visiting: dict[int, _Visit] = {}  # by the parameter's id; a visit keeps its parameter
        self._ahead: dict[int, _Visit] = {}  # likewise; the oldest first
        self._lanes: dict[Any, Lane] = {}
        # By module: the next one that needed copies. No reference to its parameters: torch.utils.swap_tensors swaps no
        # tensor that has a weak one.
        self._next: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def begin_pass(self) -> None:
        """An outermost module is called."""
        self._thread.last = None
        if not self._lanes:
            return
        with self._lock:
            self._ahead.clear()
            for lane in self._lanes.values():
                lane.begin_pass()

    def end_pass(self) -> None:
        """It has returned."""
        for lane in list(self._lanes.values()):
            lane.end_pass()

    def away_from_visits(self, parameters: Iterable[Any]) -> list[Any]:
        """Those that no copy stands for now."""
        with self._lock:
            return [each for each in parameters if id(each) not in self._visiting]

    def enter(self, module: Any, parameters: Iterable[Any], on_host: list[Any]) -> bool:
        """Copies stand for the parameters that are on the host, and go on to stand for those that had some already.

        Returns:
            Whether they do. False: there is no room for them.
        """
        import torch

        with self._lock, torch.inference_mode(False), torch.no_grad():
            visits = [self._visiting[id(each)] for each in parameters if id(each) in self._visiting]
            on_host = [each for each in on_host if id(each) not in self._visiting]  # another thread may use it since
            if not visits and not on_host:
                return True
            is_done = True
            if on_host:
                made = self._make(on_host)
                is_done = made is not None
                visits += made or []
            may_write = _may_write(module)
            self._thread.open.append((id(module), visits))
            for visit in visits:
                visit.users += 1
                visit.is_written |= may_write
                visit.lane.await_arrival(visit.arrived)
                if visit.users == 1:
                    self._visiting[id(visit.parameter)] = visit
                    visit.begin()
            if on_host and is_done:
                self._learn(module)
                self._look_ahead(module)
            return is_done

    def leave(self, module: Any) -> None:
        """The module has returned, or raised. Ends what an interrupt has left open inside it, too."""
        opened = self._thread.open
        own = next((index for index in reversed(range(len(opened))) if opened[index][0] == id(module)), None)
        if own is not None:
            self._end(own)

    def end(self) -> None:
        """Every visit, also what an interrupt has left open."""
        import torch

        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._ahead.clear()
            while self._visiting:
                self._close(next(iter(self._visiting.values())))
        self.end_pass()

    def _end(self, first: int) -> None:
        import torch

        opened = self._thread.open
        with self._lock, torch.inference_mode(False), torch.no_grad():
            while len(opened) > first:
                _, visits = opened.pop()
                for visit in visits:
                    visit.users -= 1
                    if visit.users == 0:
                        self._close(visit)

    def _close(self, visit: _Visit) -> None:
        """It may be called again where an interrupt cut it short."""
        visit.end()
        self._visiting.pop(id(visit.parameter), None)

    def _make(self, on_host: list[Any]) -> list[_Visit] | None:
        import torch

        most_bytes = self._device.allowed_bytes() // _LIMIT_PARTS
        if sum(each.nbytes for each in on_host) > most_bytes or not all(_can_pass(each) for each in on_host):
            return None
        ahead = [self._ahead.pop(id(each), None) for each in on_host]
        try:
            return [
                visit if visit is not None and visit.is_fresh() else self._copy(parameter, most_bytes)
                for parameter, visit in zip(on_host, ahead, strict=True)
            ]
        except torch.OutOfMemoryError:
            return None

    def _copy(self, parameter: Any, most_bytes: int) -> _Visit:
        lane = self._lanes.get(parameter.device)
        if lane is None:
            lane = self._lanes[parameter.device] = make_lane(parameter.device)
        held_bytes = sum(each.size_bytes for group in (self._visiting, self._ahead) for each in group.values())
        lane.await_room(most_bytes - min(most_bytes, held_bytes + parameter.nbytes))
        with self._device.ordinary():
            visit = _Visit(parameter, lane)
        count(visit.size_bytes)
        return visit

    def _learn(self, module: Any) -> None:
        last = self._thread.last() if self._thread.last is not None else None
        if last is not None and last is not module:
            self._next[last] = weakref.ref(module)
        self._thread.last = weakref.ref(module)

    def _look_ahead(self, module: Any) -> None:
        import torch

        most_bytes = min(_MOST_AHEAD_BYTES, self._device.allowed_bytes() // _LIMIT_PARTS // 2)
        ahead_bytes = sum(each.size_bytes for each in self._ahead.values())
        for _ in range(_MOST_MODULES_AHEAD):
            reference = self._next.get(module)
            module = reference() if reference is not None else None
            if module is None:
                return
            for parameter in _parameters_on_host(module):
                if id(parameter) in self._ahead or id(parameter) in self._visiting:
                    continue
                ahead_bytes += parameter.nbytes
                if ahead_bytes > most_bytes:
                    return
                try:
                    self._ahead[id(parameter)] = self._copy(parameter, 2 * most_bytes)
                except torch.OutOfMemoryError:
                    return


def _parameters_on_host(module: Any) -> list[Any]:
    parameters = [each for each in vars(module).get("_parameters", {}).values() if each is not None]
    return [each for each in parameters if each.nbytes >= LEAST_BYTES and _can_pass(each) and _is_on_host(each)]


def _is_on_host(parameter: Any) -> bool:
    found = _core.find(parameter.data_ptr())
    return found is not None and found.tag == TAG and found.host_bytes > 0


def _can_pass(parameter: Any) -> bool:
    """Whether a copy of it is like it: its elements fill its memory."""
    import torch

    return (
        type(parameter) is torch.nn.Parameter
        and not parameter.is_inference()
        and parameter.nbytes == parameter.untyped_storage().nbytes()
        and is_dense(parameter)
    )


def _may_write(module: Any) -> bool:
    """Whether it may write its parameters in a way that leaves no trace in their versions."""
    own = vars(module)
    is_torchs = type(module).__module__.startswith("torch.nn.modules.") and "forward" not in own
    return not is_torchs or bool(own.get("_forward_pre_hooks"))
