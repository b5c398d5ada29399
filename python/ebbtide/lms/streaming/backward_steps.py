"""Steps of an optimizer inside backward: each parameter is updated as soon as its gradient is there.

The states of one part pass over the bus while backward computes the next, and its gradients are freed at once.
"""

import weakref
from collections import OrderedDict, defaultdict
from types import TracebackType
from typing import Any

from ebbtide.errors import StateError
from ebbtide.lms.streaming import optimizer_step
from ebbtide.lms.streaming.step_parts import are_apart
from ebbtide.torch_support.torch_names import find

_PART_BYTES = 64 << 20  # of parameters that are updated together: each part costs kernels of its own

_followers: "weakref.WeakSet[StepInBackward]" = weakref.WeakSet()


class StepInBackward:
    """What `step_in_backward` returns. The end of a `with` over it, or `remove`, ends it, and so does the end of the
    optimizer, which holds it.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._updated: set[Any] = set()  # since the last call of `optimizer.step()`
        self._waiting: dict[Any, None] = {}  # parameters with gradients, in their order
        self._waiting_bytes = 0
        self._backward, self._has_ended = -1, True  # the one that brought the latest gradient, and whether it is over
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

    def _on_gradient(self, parameter: Any) -> None:
        self._note_backward()
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
            self._update()

    def _note_backward(self) -> None:
        """One that did not come to its end, since the program ran out of memory, say, leaves its gradients to the
        program, and nothing that counts for the next one.
        """
        import torch

        backward = find("_C._current_graph_task_id")()
        if backward == self._backward:
            return
        if not self._has_ended:
            self._forget()
        self._backward, self._has_ended = backward, False
        ours = weakref.ref(self)

        def on_end() -> None:
            if (this := ours()) is not None and this._backward == backward:
                this._has_ended = True

        torch.autograd.Variable._execution_engine.queue_callback(on_end)

    def _update(self) -> None:
        waiting = [*self._waiting]
        self._waiting, self._waiting_bytes = {}, 0
        optimizer = self._optimizer()
        if optimizer is None:
            return
        # Groups may have come and gone. Who belongs to none any more keeps its gradient.
        ours = {each for each in waiting if each.grad is not None}
        for group in optimizer.param_groups:
            if not (parameters := [each for each in group["params"] if each in ours]):
                continue
            _step(optimizer, group, parameters)
            self._updated.update(parameters)
            for parameter in parameters:
                parameter.grad = None

    def _forget(self) -> None:
        self._updated.clear()
        self._waiting.clear()
        self._waiting_bytes = 0


def _parameters_of(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _step(optimizer: Any, group: dict[str, Any], parameters: list[Any]) -> None:
    """Of these parameters of a group alone."""
    import torch

    states = optimizer.state
    of_these = defaultdict(dict, {each: states[each] for each in parameters if each in states})
    view = optimizer_step.view_of(optimizer, group, parameters, of_these)
    # The program's hooks are for its own call of `step`.
    view._optimizer_step_pre_hooks, view._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    with torch.no_grad():
        type(optimizer).step(view)
    states.update(of_these)


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
