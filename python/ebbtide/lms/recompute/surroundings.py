"""What a call may change beside its results: attributes, buffers, arguments."""

import contextlib
from collections.abc import Iterator
from typing import Any

from ebbtide.lms.recompute import bits
from ebbtide.lms.recompute.module_states import ModuleState, Subtree
from ebbtide.lms.recompute.structures import Structure
from ebbtide.lms.recompute.watch import Findings, make_watch, storages_of

MOST_COPIED_BYTES = 16 << 20  # of one buffer


class Surroundings:
    """A module and the arguments of a call, at construction."""

    def __init__(self, module: Any, structure: Structure) -> None:
        self._module, self._arguments, self._leaves = ModuleState(Subtree(module)), structure.tensors, structure.leaves
        self._are_compiled = any(_is_compiled(one) for one in module.modules())
        attributes = (value for one in module.modules() for value in vars(one).values())
        # Neither parameters nor buffers, which the state of the module has.
        self._loose = [value for value in attributes if _is_tensor(value)]
        self._versions = [tensor._version for tensor in self._loose + self._arguments]
        # BatchNorm's kernels write buffers without a new version.
        small = [(name, buffer) for name, buffer in module.named_buffers() if buffer.nbytes <= MOST_COPIED_BYTES]
        of_layers = self._module.statistics()
        self._statistics = [[(buffer, buffer.clone()) for buffer in of_layer] for of_layer in of_layers]
        statistics = {id(buffer) for of_layer in of_layers for buffer in of_layer}
        others = ((name, buffer) for name, buffer in small if id(buffer) not in statistics)
        self._buffers = [(name, buffer, buffer.detach().clone()) for name, buffer in others]

    def change(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
        """What has been changed since, as a sentence fragment; "" if nothing."""
        if name := self._module.hidden():
            return f"it holds {name}, which may change unseen"
        if name := self._module.difference():
            return f"its forward changes {name}"
        if name := self._module.written():
            return f"its forward changes {name} in place"
        if problem := self._change_of_buffers():
            return problem
        if Structure(arguments, options).leaves != self._leaves:
            return "its forward changes what an argument contains"
        if [tensor._version for tensor in self._loose + self._arguments] != self._versions:
            return "its forward changes an argument or a tensor of the module in place"
        return ""

    def _change_of_buffers(self) -> str:
        for name, buffer, copy in self._buffers:
            if bits.difference(buffer.detach(), copy):
                return f"its forward changes {name} in place"
        for of_layer in self._statistics:
            if not any(bits.difference(now, copy) for now, copy in of_layer):
                return "a layer of it may normalize by its running statistics"
        return ""

    @contextlib.contextmanager
    def watched(self, findings: Findings) -> Iterator[None]:
        """Ends a second run before it changes one of its arguments, or a tensor of the module. What is compiled would
        run uncompiled under the watch.
        """
        tensors = [*self._arguments, *self._loose, *self._module.tensors()]
        devices = {tensor.device for tensor in tensors}
        watch = contextlib.nullcontext() if self._are_compiled else make_watch(findings, storages_of(tensors), devices)
        with self._module.without_statistics(), watch:
            yield

    def restore(self) -> None:
        """Puts back the attributes, in case that the second run ended in the middle."""
        self._module.restore()


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _is_compiled(module: Any) -> bool:
    return vars(module).get("_compiled_call_impl") is not None or "_orig_mod" in vars(module)["_modules"]
