"""What the modules of a subtree hold at one moment, without copies of tensors."""

import array
import contextlib
import functools
import numbers
import operator
import pathlib
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

MOST_NESTED = 2  # containers and objects below an attribute: what lies deeper is not looked at
Path = tuple[str, ...]  # names, outermost first
_NOTHING: dict[str, Any] = {}  # most modules have no buffers, and layers no modules


class ModuleState:
    """The attributes of a module and of those below it, at construction.

    It holds the parameters and buffers that a call has used, as the graph of that call does. The running statistics of
    BatchNorm in training do not count: a forward changes them, and nothing that it computes depends on them.
    """

    def __init__(self, module: Any) -> None:
        self._modules = list(module.named_modules())
        self._dicts: list[tuple[dict[str, Any], dict[str, Any]]] = []  # four of each module: its own one, and a copy
        self._statistics: list[tuple[dict[str, Any], list[str]]] = []  # the buffers of a module, and names among them
        self._tensors: list[Any] = []
        for _, one in self._modules:
            own = vars(one)
            parameters, buffers, modules = own["_parameters"], own["_buffers"], own["_modules"]
            self._dicts += [(each, each.copy() if each else _NOTHING) for each in (own, parameters, buffers, modules)]
            self._tensors += parameters.values()
            if not buffers:
                continue
            if updated := _statistics_of(one):
                self._statistics.append((buffers, updated))
            self._tensors += [each for name, each in buffers.items() if name not in updated]
        self._contents = list(_contents_of(self._modules))
        self._tensors = [tensor for tensor in self._tensors if tensor is not None]
        self._versions = [tensor._version for tensor in self._tensors]
        self._flags = [tensor.requires_grad for tensor in self._tensors]

    def difference(self) -> str:
        """The first attribute, or what is in one, that is another one now, as a noun; "" if there is none."""
        for index, (own, copy) in enumerate(self._dicts):
            for name in {**own, **copy}:
                if name not in own or name not in copy or not _are_same(own[name], copy[name]):
                    return f"the attribute {self._path(index, name)}"
        changed = (content.path for content in self._contents if content.has_changed())
        return next((f"what {_name(path)} contains" for path in changed), "")

    def hidden(self) -> str:
        """The path of the first value that may change inside unseen, and its type; "" if there is none."""
        found = ((content.path, each) for content in self._contents for each in content.parts() if _is_hidden(each))
        own = ((path, each) for path, each in _attributes_of(self._modules) if _is_hidden(each))
        return next((f"{_name(path)}, a {type(each).__name__}" for path, each in (*own, *found)), "")

    def written(self) -> str:
        """The path of a parameter or buffer that has been written in place since; "" if there is none."""
        versions = [tensor._version for tensor in self._tensors]
        if versions == self._versions:
            return ""
        changed = next(
            one for one, *pair in zip(self._tensors, versions, self._versions, strict=True) if pair[0] != pair[1]
        )
        places = (
            (index, name) for index, (_, copy) in enumerate(self._dicts) for name in copy if copy[name] is changed
        )
        return self._path(*next(places))

    def tensors(self) -> list[Any]:
        """The parameters and buffers, without running statistics."""
        return self._tensors

    def restore(self) -> None:
        """Puts the attributes back, and what is in them."""
        for own, copy in self._dicts:
            if not _are_identical(own, copy):
                _assign(own, copy)
        for content in self._contents:
            content.restore()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within, the modules hold what they held: the program may have called `eval`, frozen parameters, or replaced
        them for the length of a call, as `torch.func.functional_call` does.
        """
        swapped = [(own, own.copy(), copy) for own, copy in self._dicts if not _are_identical(own, copy)]
        pairs = zip(self._tensors, self._flags, strict=True)
        flags = [(tensor, flag) for tensor, flag in pairs if tensor.requires_grad != flag and tensor.is_leaf]
        contents = [(content, content.now()) for content in self._contents if content.has_changed()]
        try:
            for own, _, copy in swapped:
                _assign(own, copy)
            for content, _ in contents:
                content.restore()
            for tensor, flag in flags:
                tensor.requires_grad_(flag)
            with self.without_statistics():
                yield
        finally:
            for own, now, _ in swapped:
                _assign(own, now)
            for _, content in contents:
                content.restore()
            for tensor, flag in flags:
                tensor.requires_grad_(not flag)

    def statistics(self) -> list[list[Any]]:
        """The running statistics, of each layer that has any."""
        return [[buffers[name] for name in names] for buffers, names in self._statistics]

    @contextlib.contextmanager
    def without_statistics(self) -> Iterator[None]:
        """Within, running statistics are updated in copies, which are dropped at the end."""
        updated = [(buffers, name, buffers[name]) for buffers, names in self._statistics for name in names]
        try:
            for buffers, name, statistic in updated:
                buffers[name] = statistic.clone()
            yield
        finally:
            for buffers, name, statistic in updated:
                buffers[name] = statistic

    def _path(self, index: int, name: str) -> str:
        path, _ = self._modules[index // 4]
        return _name((path, name))


class _Content:
    """A container, or the attributes of an object, and what it holds at construction."""

    def __init__(self, path: Path, held: Any) -> None:
        self.path, self._held = path, held
        self._copy: Any = dict(held) if isinstance(held, dict) else list(held)

    def parts(self) -> list[Any]:
        return _parts(self._copy)

    def has_changed(self) -> bool:
        held, copy = self._held, self._copy
        are_same_keys = len(held) == len(copy) and all(map(operator.is_, held, copy))
        if are_same_keys and (not isinstance(held, dict) or _are_identical(held, copy)):
            return False
        now, before = _parts(held), _parts(copy)
        return len(now) != len(before) or not all(map(_are_same, now, before))

    def now(self) -> "_Content":
        return _Content(self.path, self._held)

    def restore(self) -> None:
        if not self.has_changed():
            return
        if isinstance(self._held, dict):
            _assign(self._held, self._copy)
        elif isinstance(self._held, list):
            self._held[:] = self._copy
        else:
            self._held.clear()
            (self._held.update if isinstance(self._held, set) else self._held.extend)(self._copy)


def _statistics_of(module: Any) -> list[str]:
    """Which of its buffers are the running mean and its like, of batches that it normalizes by their own."""
    names = ("running_mean", "running_var", "num_batches_tracked")
    is_updated = module.training and isinstance(module, _batch_norms())
    return [name for name in names if is_updated and vars(module)["_buffers"].get(name) is not None]


@functools.cache
def _batch_norms() -> tuple[type, ...]:
    """torch may be missing when this module is imported."""
    from torch import nn

    return nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


# --- what is in attributes ---


@functools.cache
def _kept_by_torch() -> frozenset[str]:
    """The attributes of every module."""
    import torch

    return frozenset(vars(torch.nn.Module()))


@functools.cache
def _plain() -> set[type]:
    """Types of values that hold nothing."""
    import torch

    of_torch = (torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size, torch.memory_format)
    of_code = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, type)
    return {int, float, bool, complex, str, bytes, type(None), *of_torch, *of_code}


def _attributes_of(modules: list[tuple[str, Any]]) -> Iterator[tuple[Path, Any]]:
    plain, kept = _plain(), _kept_by_torch()
    for path, one in modules:
        for name, value in vars(one).items():
            if name not in kept and type(value) not in plain:
                yield (path, name), value


def _contents_of(modules: list[tuple[str, Any]]) -> Iterator[_Content]:
    seen: set[int] = set()
    for path, value in _attributes_of(modules):
        yield from _contents_in(path, value, seen, MOST_NESTED)


def _contents_in(path: Path, value: Any, seen: set[int], depth: int) -> Iterator[_Content]:
    if type(value) in _plain() or depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    plain = _plain()
    if isinstance(value, dict | list | set | deque | tuple):
        yield _Content(path, value)
        parts = [(path, part) for part in _parts(value) if type(part) not in plain]
    elif _is_object(value):
        yield _Content(path, vars(value))
        found = (*vars(value).items(), *_shared_by(type(value)))
        parts = [((*path, name), part) for name, part in found if type(part) not in plain]
    else:
        return
    for name, part in parts:
        yield from _contents_in(name, part, seen, depth - 1)


def _shared_by(kind: type) -> Iterator[tuple[str, Any]]:
    """Containers that all objects of a class have in common, without Python's own, such as `__dataclass_fields__`."""
    found = ((name, value) for name, value in vars(kind).items() if not name.startswith("__"))
    return ((name, value) for name, value in found if isinstance(value, dict | list | set | deque))


def _parts(held: Any) -> list[Any]:
    return [part for item in held.items() for part in item] if isinstance(held, dict) else list(held)


def _is_object(value: Any) -> bool:
    """Whether it is an object of the program, or of a library, that may keep what a forward tells it."""
    import torch

    kind = type(value)  # a class may have a `__getattribute__` of its own, which isinstance() calls
    known = (torch.nn.Module, torch.Tensor, type, numbers.Number, types.ModuleType)
    return not issubclass(kind, known) and not _is_of_torch(kind) and hasattr(value, "__dict__")


def _is_of_torch(kind: type) -> bool:
    """An operator of torch, say, which keeps what it looked up."""
    return kind.__module__.partition(".")[0] == "torch"


def _is_hidden(value: Any) -> bool:
    """Whether it changes where nobody sees that: an iterator, random numbers, bytes, an object without a `__dict__`."""
    kind = type(value)
    if kind in _plain() or isinstance(value, numbers.Number | tuple | pathlib.PurePath):
        return False
    if _is_of_torch(kind):
        return isinstance(value, random_sources())
    has_slots = hasattr(kind, "__slots__") and not hasattr(value, "__dict__")
    return has_slots or hasattr(kind, "__next__") or isinstance(value, (bytearray, array.array, *_arrays()))


def _arrays() -> tuple[type, ...]:
    numpy: Any = sys.modules.get("numpy")
    return random_sources() if numpy is None else (numpy.ndarray, *random_sources())


def random_sources() -> tuple[type, ...]:
    """Generators of random numbers of a program's own."""
    import torch

    numpy: Any = sys.modules.get("numpy.random")
    return (torch.Generator, random.Random, *((numpy.Generator, numpy.RandomState) if numpy else ()))


def _name(path: Path) -> str:
    return ".".join(filter(None, path))


def _are_identical(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one.values(), other.values()))


def _are_same(one: Any, other: Any) -> bool:
    """A number that is computed again is another object of the same value."""
    return one is other or (type(one) is type(other) and isinstance(one, int | float | str) and one == other)


def _assign(own: dict[str, Any], values: dict[str, Any]) -> None:
    """Never empties it in between: another thread may read it."""
    own.update(values)
    for name in own.keys() - values.keys():
        del own[name]
