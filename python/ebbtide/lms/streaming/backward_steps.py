"""Steps of an optimizer inside backward: each parameter is updated as soon as its gradient is there.

The states of one part pass over the bus while backward computes the next, and its gradients are freed at once.
"""

import weakref
from collections import defaultdict
from types import TracebackType
from typing import Any, NamedTuple

from ebbtide.errors import StateError
from ebbtide.lms.streaming import optimizer_step
from ebbtide.lms.streaming.beside import Beside
from ebbtide.lms.streaming.host_ranges import HostRanges
from ebbtide.lms.streaming.step_parts import are_apart
from ebbtide.locks import locked, make_lock
from ebbtide.saver.pools import captures
from ebbtide.torch_support.torch_names import find

_PART_BYTES = 64 << 20  # of parameters that are updated together: each part costs kernels of its own

_followers: "weakref.WeakSet[StepInBackward]" = weakref.WeakSet()


class _Running(NamedTuple):
    on_end: weakref.ref[Any]  # gone where the backward has failed
    beside: Beside


class StepInBackward:
    """What `step_in_backward` returns. The end of a `with` over it, or `remove`, ends it, and so does the end of the
    optimizer, which holds it.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._lock = make_lock()  # autograd has a thread for each device
        self._updated: set[Any] = set()  # since the last call of `optimizer.step()`
        self._waiting: dict[Any, None] = {}  # parameters with gradients, in their order
        self._waiting_bytes = 0
        self._running: dict[int, _Running] = {}  # backwards by torch's number
        self._handles = [optimizer.register_step_post_hook(lambda *_: self._forget())]
        for parameter in _parameters_of(optimizer):
            if parameter.requires_grad:
                self._follow(parameter)
        _followers.add(self)
        weakref.finalize(optimizer, _remove_all, self._handles).atexit = False

    def __enter__(self) -> "StepInBackward":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def remove(self) -> None:
        """Ends it. Can be called again. Gradients that wait for an update stay for `optimizer.step()`."""
        _followers.discard(self)
        _remove_all(self._handles)
        self._forget()

    def holds_any(self, parameters: list[Any]) -> bool:
        """Whether it updates one of them."""
        optimizer = self._optimizer()
        ours = set() if optimizer is None else set(_parameters_of(optimizer))
        return not ours.isdisjoint(parameters)

    def _follow(self, parameter: Any) -> None:
        # The garbage collector does not see what hooks of tensors hold. The optimizer's own hook keeps this alive.
        ours = weakref.ref(self)

        def on_gradient(parameter: Any) -> None:
            if (this := ours()) is not None:
                this._on_gradient(parameter)

        self._handles.append(parameter.register_post_accumulate_grad_hook(on_gradient))

    @locked
    def _on_gradient(self, parameter: Any) -> None:
        beside = self._note_backward()
        if parameter in self._updated:
            self._forget()
            raise StateError(
                "step_in_backward updates a parameter at its first gradient, and this one got a second before "
                "optimizer.step(): call that after each backward. It can't accumulate gradients"
            )
        if parameter not in self._waiting:
            self._waiting[parameter] = None
            self._waiting_bytes += parameter.nbytes
        if self._waiting_bytes >= _PART_BYTES:
            self._update(beside)

    def _note_backward(self) -> Beside:
        """Forgets what a failed one did: its gradients are the program's. torch keeps `on_end` while a backward runs,
        also while another one runs inside it, and drops it without a call if the backward fails.
        """
        import torch

        backward = find("_C._current_graph_task_id")()
        if backward in self._running:
            return self._running[backward].beside
        if failed := [number for number, each in self._running.items() if each.on_end() is None]:
            self._forget()
            self._running = {number: self._running[number] for number in self._running.keys() - failed}
        # `zero_grad` may have taken some.
        self._waiting = {each: None for each in self._waiting if each.grad is not None}
        self._waiting_bytes = sum(each.nbytes for each in self._waiting)

        beside = Beside()

        def on_end() -> None:
            with self._lock:
                self._running.pop(backward, None)
                beside.close()

        # Where the backward has failed, the reference calls it.
        self._running[backward] = _Running(weakref.ref(on_end, lambda _: beside.close()), beside)
        torch.autograd.Variable._execution_engine.queue_callback(on_end)
        return beside

    def _update(self, beside: Beside) -> None:
        waiting = [*self._waiting]
        self._waiting, self._waiting_bytes = {}, 0
        optimizer = self._optimizer()
        if optimizer is None:
            return
        # Groups may have come and gone. A parameter that belongs to none any more keeps its gradient.
        ours = {each for each in waiting if each.grad is not None}
        groups = [(group, [each for each in group["params"] if each in ours]) for group in optimizer.param_groups]
        parts = [{**group, "params": parameters} for group, parameters in groups if parameters]
        parameters = [each for group in parts for each in group["params"]]
        lacks_states = not all(optimizer.state.get(each) for each in parameters)
        if lacks_states or captures.is_capturing() or not HostRanges.are_any():
            _step(optimizer, parts, lacks_states)
        else:
            beside.run([each.grad for each in parameters], lambda: _step(optimizer, parts, lacks_states))
        for parameter in parameters:
            self._updated.add(parameter)
            parameter.grad = None

    @locked
    def _forget(self) -> None:
        for _, beside in self._running.values():
            beside.close()
        self._updated.clear()
        self._waiting.clear()
        self._waiting_bytes = 0


def _parameters_of(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _step(optimizer: Any, groups: list[dict[str, Any]], lacks_states: bool) -> None:
    """Of these groups alone, without hooks around it: those are for the program's own call of `step`."""
    import torch

    all_groups, states = optimizer.param_groups, optimizer.state
    optimizer.param_groups = groups
    if lacks_states:  # LMS looks at all of them
        parameters = [each for group in groups for each in group["params"]]
        optimizer.state = defaultdict(dict, {each: states[each] for each in parameters if each in states})
    try:
        with torch.no_grad():
            optimizer_step.inner_step(type(optimizer))(optimizer)
    finally:
        states.update(optimizer.state)
        optimizer.param_groups, optimizer.state = all_groups, states


def _remove_all(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def step_in_backward(optimizer: Any) -> StepInBackward:
    """Updates parameters inside backward, as soon as there are gradients of 64 MiB together, and frees those.

        ebbtide.lms.step_in_backward(optimizer)

    Large model support then has the states of one part on the bus while backward computes the next, and gradients take
    next to no memory. The loop stays as it is: `optimizer.step()` updates what is left. Results are the same, bit for
    bit, as with `zero_grad(set_to_none=True)`.

    Each backward is a step for all parameters that it reaches: none can be skipped. Nothing may look at all gradients
    between backward and `optimizer.step()`, or change the optimizer's options there: no clipping, no GradScaler, no
    accumulation over several backwards, no data parallel training. After an error in backward, parameters that were
    updated by then stay updated.

    Args:
        optimizer: one of torch's own that computes each element by itself, such as AdamW or SGD.

    Returns:
        A context manager whose end, or `remove()`, ends it.

    Raises:
        StateError: another optimizer, parameters that share memory, or that another optimizer updates so already, or a
            process group of several processes. Later, in backward: a parameter gets a second gradient before
            `optimizer.step()`.
    """
    import torch

    if not optimizer_step.is_possible(optimizer):
        raise StateError(
            f"step_in_backward can't take {type(optimizer).__name__}: it needs one of torch's own optimizers that "
            "compute each element by itself, such as AdamW or SGD"
        )
    parameters = _parameters_of(optimizer)
    if not are_apart(parameters):
        raise StateError(
            "step_in_backward would change a parameter that backward still reads through another one: some of them "
            "share memory"
        )
    if any(each.holds_any(parameters) for each in _followers):
        raise StateError("step_in_backward updates these parameters already: call remove() of what it returned before")
    processes = torch.distributed
    if processes.is_available() and processes.is_initialized() and processes.get_world_size() > 1:
        raise StateError("step_in_backward would update parameters before processes have exchanged gradients")
    return StepInBackward(optimizer)
