"""Finds the tensors in modules, optimizers and containers."""

import dataclasses
import gc
import sys
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch

# How a thing was reached: the path of its container, and its name there; () for an argument.
_Path: TypeAlias = tuple[Any, ...]

_SPARSE_PARTS = {
    "torch.sparse_coo": ("_indices", "_values"),
    "torch.sparse_csr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values"),
}


class FoundTensor(NamedTuple):
    """A tensor of a walk, and its kind: "parameter", "buffer", "gradient", "state" (of an optimizer) or "tensor".
    `owner` is the wrapper or the sparse tensor that it is a part of, else the tensor itself."""

    tensor: "torch.Tensor"
    kind: str
    owner: "torch.Tensor"


class TensorWalk:
    """Every tensor in modules, optimizers, tensors, mappings, sequences, sets and dataclasses, each once.

    - A module gives its parameters, buffers (those that are not saved too) and gradients; an optimizer its state and
      its groups, which hold parameters.
    - A wrapper (DTensor, a nested or a quantized tensor of torchao) gives its content; a sparse tensor its indices
      and values.
    - Anything else in a container is passed by; as an argument of its own it is refused. An object that might hold
      tensors is noted: `passed_by` has the type of each, by how it was reached.
    """

    def __init__(self, caller: str = "adopt", *, with_gradients: bool = True) -> None:
        import torch

        self._kinds = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, Mapping, list, tuple, set, frozenset)
        self._plain = (torch.Tensor, torch.nn.Parameter)
        self._parameter = torch.nn.Parameter
        self._strided = torch.strided
        self._caller = caller
        self._with_gradients = with_gradients
        self._seen: set[int] = set()
        self._keep: list[Any] = []  # kept alive, so that no id is reused meanwhile
        self.passed_by: dict[str, str] = {}

    def walk(self, thing: Any) -> "Iterator[torch.Tensor]":
        """The tensors in one argument.

        Raises:
            TypeError: nothing that can hold tensors.
        """
        for found in self.find(thing):
            yield found.tensor

    def find(self, thing: Any) -> Iterator[FoundTensor]:
        """The same, each with its kind."""
        if not self._is_known(thing):
            raise TypeError(
                f"{self._caller} takes tensors, modules, optimizers, and containers or dataclasses of them, "
                f"not {type(thing).__name__}"
            )
        yield from self._visit(thing, "")

    @property
    def seen(self) -> list[Any]:
        """The tensors, modules, optimizers and containers that it came by. The modules inside a module are left out."""
        return list(self._keep)

    def is_plain(self, thing: Any) -> bool:
        """Whether it is a tensor that holds its bytes itself. Hundreds of these are looked at before a resume in the
        background is under way."""
        return type(thing) in self._plain and thing.layout is self._strided

    def _is_known(self, thing: Any) -> bool:
        return isinstance(thing, self._kinds) or _is_dataclass_object(thing)

    def _visit(
        self, thing: Any, kind: str, owner: "torch.Tensor | None" = None, path: _Path = ()
    ) -> Iterator[FoundTensor]:
        if id(thing) in self._seen:
            return
        if not self._is_known(thing):
            if _may_hold_tensors(thing):
                self._note(path, thing)
            return
        self._seen.add(id(thing))
        self._keep.append(thing)
        if isinstance(thing, self._kinds[0]):
            kind = kind or ("parameter" if isinstance(thing, self._parameter) else "tensor")
            yield from self._visit_tensor(thing, kind, thing if owner is None else owner)
        else:
            for part_kind, name, part in _parts(thing):
                yield from self._visit(part, part_kind or kind, path=(path, name))

    def _note(self, path: _Path, thing: Any) -> None:
        names = _names_in(path)
        if not any(name.startswith("__") for name in names):  # of Python itself, as in globals()
            self.passed_by[".".join(names)] = type(thing).__name__

    def _visit_tensor(self, tensor: "torch.Tensor", kind: str, owner: "torch.Tensor") -> Iterator[FoundTensor]:
        if self.is_plain(tensor):
            yield FoundTensor(tensor, kind, owner)
        else:
            yield from self._visit_parts(tensor, kind, owner)
        if self._with_gradients and why_without_memory(tensor) is None and tensor.is_leaf and tensor.grad is not None:
            yield from self._visit(tensor.grad, "gradient")

    def _visit_parts(self, tensor: "torch.Tensor", kind: str, owner: "torch.Tensor") -> Iterator[FoundTensor]:
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            for name in names:
                yield from self._visit(getattr(tensor, name), kind, owner)
        elif str(tensor.layout) in _SPARSE_PARTS:
            for part in sparse_parts(tensor):
                yield from self._visit(part, kind, owner)
        else:
            yield FoundTensor(tensor, kind, owner)


def why_without_memory(tensor: "torch.Tensor") -> str | None:
    """The kind of a tensor that must not be asked for its storage; None for a tensor that may.

    torch raises errors of its own for these, and for some it ends the process.
    """
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        if torch.nn.parameter.is_lazy(tensor):
            return "an uninitialized parameter"
        fakes = sys.modules.get("torch._subclasses.fake_tensor")  # not imported here, since that takes long
        if fakes is not None and isinstance(tensor, fakes.FakeTensor):
            return "a fake tensor"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor inside torch.func or vmap"
    if torch._is_functional_tensor(tensor):
        return "a functional tensor of torch.compile"
    return None if torch._C._has_storage(tensor) else "a tensor without a storage"


def sparse_parts(tensor: "torch.Tensor") -> "list[torch.Tensor]":
    """The tensors that a sparse tensor consists of; none for a dense one."""
    names = _SPARSE_PARTS.get(str(tensor.layout), ())
    return [getattr(tensor.detach(), name)() for name in names]


def _parts(thing: Any) -> Iterator[tuple[str, object, Any]]:
    """The content of an object, each with its kind, "" for that of the object, and its name there."""
    import torch

    if isinstance(thing, torch.nn.Module):
        for module in thing.modules():
            yield from (("parameter", name, each) for name, each in module._parameters.items())
            yield from (("buffer", name, each) for name, each in module._buffers.items())
    elif isinstance(thing, torch.optim.Optimizer):
        yield from (("state", "state", each) for each in list(thing.state.values()))
        for group in thing.param_groups:  # the learning rate, for one, may be a tensor
            yield from (("parameter" if key == "params" else "state", key, each) for key, each in group.items())
    elif isinstance(thing, Mapping):
        yield from (("", name, each) for name, each in list(thing.items()))
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from (("", number, each) for number, each in enumerate(thing))
    else:
        for field in dataclasses.fields(thing):
            yield "", field.name, getattr(thing, field.name, None)


def _names_in(path: _Path) -> list[str]:
    names: list[str] = []
    while path:
        path, name = path
        names.append(name if isinstance(name, str) else repr(name) if isinstance(name, int) else type(name).__name__)
    return names[::-1]


def _may_hold_tensors(thing: Any) -> bool:
    """Not of modules, classes, plain values and functions that close over nothing."""
    if isinstance(thing, types.FunctionType | types.MethodType):
        closes_over = getattr(thing, "__closure__", None)
        return bool(closes_over) or isinstance(thing, types.MethodType)
    if isinstance(thing, type | types.ModuleType | types.BuiltinFunctionType | Enum):
        return False
    # Instances of Python classes, and objects of C that refer to others: generators, iterators, partial().
    return hasattr(thing, "__dict__") or gc.is_tracked(thing)


def _is_dataclass_object(thing: Any) -> bool:
    return dataclasses.is_dataclass(thing) and not isinstance(thing, type)
