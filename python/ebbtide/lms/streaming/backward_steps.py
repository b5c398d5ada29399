"""Steps of an optimizer inside backward: each parameter is updated as soon as its gradient is there.

The states of one part pass over the bus while backward computes the next parts, and its gradients are freed soon.
"""

import weakref
from collections import defaultdict
from types import TracebackType
from typing import Any, NamedTuple

from ebbtide.errors import StateError
from ebbtide.lms.streaming import optimizer_step
from ebbtide.lms.streaming.backward_updates import BackwardUpdates
from ebbtide.lms.streaming.host_ranges import HostRanges
from ebbtide.lms.streaming.step_copies import Staging, current_stream
from ebbtide.lms.streaming.step_parts import are_apart, has_states
from ebbtide.locks import locked, make_lock
from ebbtide.saver.pools import backends, captures
from ebbtide.torch_support.ranks import has_ranks
from ebbtide.torch_support.torch_names import find

_PART_BYTES = 64 << 20  # of parameters that are updated together: each part costs kernels of its own

_followers: "weakref.WeakSet[StepInBackward]" = weakref.WeakSet()


# By torch's number of a backward, for all that update in it.
_updates: "weakref.WeakValueDictionary[int, BackwardUpdates]" = weakref.WeakValueDictionary()
_lock = make_lock()


class _Backward(NamedTuple):
    """on_end is gone where it has failed. It may go in a thread of autograd, a moment after the program has the error:
    until then the program may read what is being updated.
    """

    on_end: weakref.ref[Any]
    updates: BackwardUpdates


class StepInBackward:
    """What `step_in_backward` returns. The end of a `with` over it, or `remove`, ends it, and so does the end of the
    optimizer, which holds it.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._lock = make_lock()  # autograd has a thread for each device
        self._updated: set[Any] = set()  # since the last call of `optimizer.step()`
        # Parameters with gradients, in their order, and the stream that made each.
        self._waiting: dict[Any, Any] = {}
        self._waiting_bytes = 0
        self._running: dict[int, _Backward] = {}  # by torch's number
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
        updates = self._note_backward()
        if parameter in self._updated:
            self._forget()
            raise StateError(
                "step_in_backward updates a parameter at its first gradient, and this one got a second before "
                "optimizer.step(): call that after each backward. It can't accumulate gradients"
            )
        if parameter not in self._waiting:
            self._waiting_bytes += parameter.nbytes
        self._waiting[parameter] = current_stream(parameter.device)
        if self._waiting_bytes >= _PART_BYTES:
            self._update(updates)

    def _note_backward(self) -> BackwardUpdates:
        """Forgets what a failed one did: its gradients are the program's. torch keeps `on_end` while a backward runs,
        also while another one runs inside it, and drops it without a call if the backward fails.
        """
        import torch

        backward = find("_C._current_graph_task_id")()
        if backward in self._running:
            return self._running[backward].updates
        if failed := [number for number, each in self._running.items() if each.on_end() is None]:
            self._forget()
            self._running = {number: self._running[number] for number in self._running.keys() - failed}
        # `zero_grad` may have taken some.
        self._waiting = {each: stream for each, stream in self._waiting.items() if each.grad is not None}
        self._waiting_bytes = sum(each.nbytes for each in self._waiting)

        updates = _updates_of(backward)

        def on_end() -> None:
            with self._lock:
                updates.close()
                self._running.pop(backward, None)

        # Where the backward has failed, the reference calls it.
        self._running[backward] = _Backward(weakref.ref(on_end, lambda _: updates.close()), updates)
        torch.autograd.Variable._execution_engine.queue_callback(on_end)
        return updates

    def _update(self, updates: BackwardUpdates) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        optimizer = self._optimizer()
        if optimizer is None:
            return
        # Groups may have come and gone. A parameter that belongs to none any more keeps its gradient.
        ours = {each for each in waiting if each.grad is not None}
        groups = [(group, [each for each in group["params"] if each in ours]) for group in optimizer.param_groups]
        parts = [{**group, "params": parameters} for group, parameters in groups if parameters]
        if _may_be_late(optimizer, parts):
            gradients = [(each.grad, waiting[each]) for group in parts for each in group["params"]]
            updates.run(gradients, lambda staging: _step(optimizer, parts, staging))
        else:
            _step(optimizer, parts)
        for parameter in [each for group in parts for each in group["params"]]:
            self._updated.add(parameter)
            parameter.grad = None

    @locked
    def _forget(self) -> None:
        for _, updates in self._running.values():
            updates.close()
        self._updated.clear()
        self._waiting.clear()
        self._waiting_bytes = 0


def _parameters_of(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _updates_of(backward: int) -> BackwardUpdates:
    with _lock:
        return _updates.setdefault(backward, BackwardUpdates())


def _may_be_late(optimizer: Any, groups: list[dict[str, Any]]) -> bool:
    """Whether there is something to copy, and no state to make, which belongs to the stream that makes it."""
    if backends.existing_backend() is None or backends.is_forked_child():  # the core may be of no use here
        return False
    if captures.is_capturing() or not HostRanges.are_any():
        return False
    return all(_has_states(optimizer, group, each) for group in groups for each in group["params"])


def _has_states(optimizer: Any, group: dict[str, Any], parameter: Any) -> bool:
    return has_states(optimizer, group, optimizer.state.get(parameter, {}))


def _step(optimizer: Any, groups: list[dict[str, Any]], staging: Staging | None = None) -> None:
    """Of these groups alone, without hooks around it: those are for the program's own call of `step`."""
    import torch

    all_groups, states = optimizer.param_groups, optimizer.state
    parameters = [each for group in groups for each in group["params"]]
    optimizer.param_groups = groups
    if not all(states.get(each) for each in parameters):  # where states are made, LMS looks at all of them
        optimizer.state = defaultdict(dict, {each: states[each] for each in parameters if each in states})
    try:
        with torch.no_grad(), optimizer_step.Part(staging):
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

    Large model support then has the states of one part on the bus while backward computes the next ones, and gradients
    of three parts take memory at most. The loop stays as it is: `optimizer.step()` updates what is left. Results are
    the same, bit for bit, as with `zero_grad(set_to_none=True)`.

    Each backward is a step for all parameters that it reaches: none can be skipped. Nothing may look at all gradients
    between backward and `optimizer.step()`, or change the optimizer's options there: no clipping, no GradScaler, no
    accumulation over several backwards, no data parallel training. Hooks in backward may not read parameters or states
    that it has updated, since that may still be under way. After an error in backward, parameters that were updated by
    then stay updated.

    Args:
        optimizer: one of torch's own that computes each element by itself, such as AdamW or SGD.

    Returns:
        A context manager whose end, or `remove()`, ends it.

    Raises:
        StateError: another optimizer, parameters that share memory, or that another optimizer updates so already, or a
            process group of several processes. Later, in backward: a parameter gets a second gradient before
            `optimizer.step()`.
    """
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
    if has_ranks():
        raise StateError("step_in_backward would update parameters before processes have exchanged gradients")
    return StepInBackward(optimizer)
