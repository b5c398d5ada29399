"""A dispatch mode that ends a second run before an operation whose effect can't be undone.

It is on in the second run of a trial alone, so that the first one is what the program would have done: under a mode,
compiled functions run uncompiled, with other roundings.
"""

import functools
from collections.abc import Iterable
from typing import Any

from ebbtide.lms.recompute.global_states import of_device
from ebbtide.torch_support.torch_names import find

COLLECTIVES = ("c10d", "_c10d", "symm_mem")  # how the namespaces of such operations begin


class Stopped(Exception):  # noqa: N818 - a signal, as StopIteration
    """Ends a second run. What it found stands in the `Findings`."""


class Findings:
    """What speaks against a second run."""

    def __init__(self) -> None:
        self.objection = ""  # the first one

    def stop(self, objection: str) -> None:
        """Notes the objection, in case that the module catches the exception."""
        self.objection = self.objection or objection
        raise Stopped(objection)


def _objection_to_operation(func: Any, arguments: Any, options: dict[str, Any]) -> str:
    import torch

    if func.namespace.startswith(COLLECTIVES):
        return f"it communicates with other ranks ({func.namespace}.{func.__name__})"
    if any(isinstance(value, torch.Generator) for value in (*arguments, *options.values())):
        return "it draws random numbers from a generator of its own"
    return ""


def _objection_to_writes(func: Any, arguments: Any, options: dict[str, Any], kept: set[int]) -> str:
    import torch

    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = options.get(argument.name, arguments[index] if index < len(arguments) else None)
        values = value if isinstance(value, list | tuple) else [value]
        if kept & storages_of(one for one in values if isinstance(one, torch.Tensor)):
            return f"it changes an argument or a tensor of the module in place ({func.__name__})"
    return ""


@functools.cache
def _make_class() -> type:
    """torch may be missing when this module is imported."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __init__(self, findings: Findings, kept: set[int], devices: set[Any]) -> None:
            super().__init__()
            self._findings, self._kept = findings, kept
            # Where the generator of each device stood after the last random number.
            self._random = {device: of_device(device) for device in devices if device.type != "meta"}

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            """Compiled functions stay compiled."""
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            options = kwargs or {}
            objection = _objection_to_operation(func, args, options) or _objection_to_writes(
                func, args, options, self._kept
            )
            if objection:
                self._findings.stop(objection)
            if torch.Tag.nondeterministic_seeded not in func.tags:
                return func(*args, **options)
            # Megatron's dropout puts the state of a generator of its own in place of torch's, and takes it back.
            if any(not torch.equal(of_device(device), state) for device, state in self._random.items()):
                self._findings.stop("it sets the state of torch's random numbers")
            result = func(*args, **options)
            self._random = {device: of_device(device) for device in self._random}
            return result

    return Watch


def make_watch(findings: Findings, kept: set[int], devices: set[Any]) -> Any:
    """The mode. `kept` has the storages that must not be written (`storages_of`)."""
    return _make_class()(findings, kept, devices)


def storages_of(tensors: Iterable[Any]) -> set[int]:
    has_storage = find("_C._has_storage")
    return {tensor.untyped_storage()._cdata for tensor in tensors if has_storage(tensor)}
