"""The arguments of a call, taken apart into tensors and a structure without tensors, and put together again.

A checkpoint shows the saved-tensor hooks outside only those tensors that it gets by position. What lies in a dict or in
a keyword would be held out of their sight, so that LMS could not evict it.
"""

import copy
import dataclasses
import enum
import functools
import numbers
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

MOST_NESTED = 32  # containers in each other; a container that holds itself is deeper


class Structure:
    """The structure of positional arguments and keyword options, without their tensors.

    Args:
        module: that is called with them. A cache of keys and values, which it would add to a second time, is as it was
            before the call in what `fill` makes.

    Attributes:
        tensors: each tensor once, however often it is passed: attention compares its arguments by identity. Clear it
            before the structure is kept, or it keeps them alive.
        leaves: the identity of each tensor and each other value, to tell whether a container has been changed.
        has_cache: a growing cache is among the arguments.
        unknown: the first argument that can't be taken apart, as a sentence fragment; "" if there is none.
    """

    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any], module: Any = None) -> None:
        self._module = module
        self._places: frozenset[int] | None = None
        self.tensors: list[Any] = []
        self.leaves: list[int] = []
        self.unknown, self.has_cache = "", False
        self._indices: dict[int, int] = {}
        self._arguments = [self._take(value, f"argument {index}") for index, value in enumerate(arguments)]
        self._options = {name: self._take(value, f"argument {name}") for name, value in options.items()}
        self._indices.clear()
        self._module = self._places = None

    def fill(self, tensors: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments and options with these tensors, in new containers."""
        named = {name: make(tensors) for name, make in self._options.items()}
        return [make(tensors) for make in self._arguments], named

    def _take(self, value: Any, name: str, depth: int = 0) -> Callable[[list[Any]], Any]:
        import torch

        if isinstance(value, torch.Tensor):
            self.leaves.append(id(value))
            index = self._indices.setdefault(id(value), len(self.tensors))
            if index == len(self.tensors):
                self.tensors.append(value)
            return lambda tensors: tensors[index]
        if is_growing_cache(value):
            before, self.has_cache = _copy_of_cache(value, self._layers()), True
            self.leaves.append(id(value))
            return lambda tensors: _copy_of_cache(before, frozenset())
        opened = None if is_immutable(value) else open_container(value)
        if opened is None or depth == MOST_NESTED:
            if not is_immutable(value):
                self.unknown = self.unknown or f"its {name} is or holds a {type(value).__name__}"
            self.leaves.append(id(value))
            return lambda tensors: value
        parts, make = opened
        self.leaves.append(len(parts))
        fillers = [self._take(part, name, depth + 1) for part in parts]
        return lambda tensors: make([fill(tensors) for fill in fillers])

    def _layers(self) -> frozenset[int]:
        """The places of the module's layers in a cache."""
        if self._places is None:
            modules = () if self._module is None else self._module.modules()
            places = (vars(each).get("layer_idx") for each in modules)
            self._places = frozenset(place for place in places if isinstance(place, int))
        return self._places


def is_immutable(value: Any) -> bool:
    """Whether a value can be handed to the second run as it is."""
    return isinstance(value, _immutable())


@functools.cache
def _immutable() -> tuple[type, ...]:
    """torch may be missing when this module is imported."""
    import torch

    of_torch = (torch.dtype, torch.device, torch.layout, torch.memory_format)
    return (type(None), str, bytes, numbers.Number, enum.Enum, range, slice, type(...), type, *of_torch)


def is_growing_cache(value: Any) -> bool:
    """Whether it is a cache that transformers hands to each layer, in training, too, and whose entries are replaced by
    longer ones and not written in place."""
    if not _is_of_transformers(value):
        return False
    parts = [part for part in vars(value).values() if _is_of_transformers(part)]
    layers = vars(value).get("layers", [])
    if "layers" not in vars(value) and not parts:
        return False
    return all(type(layer).__name__.startswith("Dynamic") for layer in layers) and all(map(is_growing_cache, parts))


def _is_of_transformers(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.startswith("transformers.") and hasattr(kind, "get_seq_length")


def _copy_of_cache(cache: Any, places: frozenset[int]) -> Any:
    """With the same entries. Those of layers at other places are left out, if there are any, or the copy would keep
    them alive.
    """
    made = copy.copy(cache)
    for name, part in vars(cache).items():
        if name == "layers":
            layers = enumerate(part)
            setattr(made, name, [copy.copy(each) if not places or at in places else None for at, each in layers])
        elif _is_of_transformers(part):
            setattr(made, name, _copy_of_cache(part, places))
        elif type(part) in (list, dict, set):
            setattr(made, name, copy.copy(part))
    return made


def open_container(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The content of a container, and what makes a new one of other content; None of what is no known container."""
    kind = type(value)
    if kind is list or kind is tuple:
        return list(value), kind
    if isinstance(value, tuple):
        return list(value), (lambda parts: kind(*parts)) if hasattr(value, "_fields") else kind
    if kind is dict or kind is OrderedDict:
        keys = list(value)
        return list(value.values()), lambda parts: kind(zip(keys, parts, strict=True))
    if dataclasses.is_dataclass(value):
        return _open_dataclass(value)
    return None


def _open_dataclass(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Also of transformers' ModelOutput, which is an OrderedDict besides. A new one is made without its `__init__`,
    which may do anything.
    """
    kind: Any = type(value)
    is_dict = isinstance(value, OrderedDict)
    keys = list(OrderedDict.keys(value)) if is_dict else []
    names = list(vars(value)) if hasattr(value, "__dict__") else [field.name for field in dataclasses.fields(value)]

    def make(parts: list[Any]) -> Any:
        made = kind.__new__(kind)
        for key, part in zip(keys, parts, strict=False):
            OrderedDict.__setitem__(made, key, part)
        for name, part in zip(names, parts[len(keys) :], strict=True):
            object.__setattr__(made, name, part)
        return made

    return [*(OrderedDict.values(value) if is_dict else ()), *(getattr(value, name) for name in names)], make


def tensors_in(value: Any) -> list[Any]:
    """The tensors in a result, as far as its containers are known."""
    return Structure((value,), {}).tensors
