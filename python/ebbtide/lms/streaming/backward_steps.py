"""Steps of an optimizer inside backward: each parameter is updated as soon as its gradient is there.

The states of one part pass over the bus while backward computes the next, and its gradients are freed at once.
"""

import weakref
from collections import OrderedDict, defaultdict
from types import TracebackType
from typing import Any

from ebbtide.errors import StateError
from ebbtide.lms.streaming import optimizer_step

_PART_BYTES = 64 << 20  # of parameters that are updated together: each part costs kernels of its own


class StepInBackward:
    """What `step_in_backward` returns. The end of a `with` over it, or `remove`, ends it."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._updated: set[Any] = set()  # since the last call of `optimizer.step()`
        self._waiting: list[tuple[int, Any]] = []  # the number of the group, and a parameter with a gradient
        self._handles = [optimizer.register_step_post_hook(self._on_step)]
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._follow(number, parameter)

    def __enter__(self) -> "StepInBackward":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def remove(self) -> None:
        """Ends it. Can be called again. Gradients that wait for an update stay for `optimizer.step()`."""
        while self._handles:
            self._handles.pop().remove()
        self._waiting.clear()

    def _follow(self, group: int, parameter: Any) -> None:
        # The garbage collector does not see what hooks of tensors hold. The optimizer's own hook keeps this alive.
        ours = weakref.ref(self)

        def on_gradient(parameter: Any) -> None:
            if (this := ours()) is not None:
                this._on_gradient(group, parameter)

        self._handles.append(parameter.register_post_accumulate_grad_hook(on_gradient))

    def _on_gradient(self, group: int, parameter: Any) -> None:
        if parameter in self._updated:
            raise StateError(
                "step_in_backward updates a parameter at its first gradient, and this one got a second before "
                "optimizer.step(): call that after each backward. It can't accumulate gradients"
            )
        self._waiting.append((group, parameter))
        if sum(each.nbytes for _, each in self._waiting) >= _PART_BYTES:
            self._update()

    def _update(self) -> None:
        import torch

        waiting, self._waiting = self._waiting, []
        by_group: dict[int, dict[Any, None]] = {}
        for number, parameter in waiting:  # twice where a gradient was accumulated meanwhile
            by_group.setdefault(number, {})[parameter] = None
        states = self._optimizer.state
        for number, parameters in by_group.items():
            group = self._optimizer.param_groups[number]
            of_these = defaultdict(dict, {each: states[each] for each in parameters if each in states})
            view = optimizer_step.view_of(self._optimizer, group, [*parameters], of_these)
            # The program's hooks are for its own call of `step`.
            view._optimizer_step_pre_hooks, view._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
            with torch.no_grad():
                type(self._optimizer).step(view)
            states.update(of_these)
            self._updated.update(parameters)
            for parameter in parameters:
                parameter.grad = None

    def _on_step(self, *_: Any) -> None:
        self._updated.clear()
        self._waiting.clear()


def step_in_backward(optimizer: Any) -> StepInBackward:
    """Updates parameters inside backward, as soon as there are gradients of 64 MiB together, and frees those.

        ebbtide.lms.step_in_backward(optimizer)

    Large model support then has the states of one part on the bus while backward computes the next, and gradients take
    next to no memory. The loop stays as it is: `optimizer.step()` updates what is left. Results are the same, bit for
    bit.

    Nothing may look at all gradients between backward and `optimizer.step()`: no clipping, no GradScaler, no
    accumulation over several backwards, no data parallel training.

    Args:
        optimizer: one of torch's own that computes each element by itself, such as AdamW or SGD.

    Returns:
        A context manager whose end, or `remove()`, ends it.

    Raises:
        StateError: another optimizer, or a process group of several processes. Later, in backward: a parameter gets a
            second gradient before `optimizer.step()`.
    """
    import torch

    if not optimizer_step.is_possible(optimizer):
        raise StateError(
            f"step_in_backward can't take {type(optimizer).__name__}: it needs one of torch's own optimizers that "
            "compute each element by itself, such as AdamW or SGD"
        )
    processes = torch.distributed
    if processes.is_available() and processes.is_initialized() and processes.get_world_size() > 1:
        raise StateError("step_in_backward would update parameters before processes have exchanged gradients")
    return StepInBackward(optimizer)
