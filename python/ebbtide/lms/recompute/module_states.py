"""What the modules of a subtree hold at one moment, without copies of tensors."""

import array
import contextlib
import functools
import itertools
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
_CONTAINERS = (dict, list, set, deque, tuple)
_DICTS = ("_parameters", "_buffers", "_modules")  # of every module


# The same tuple for all modules of a class, which Python's collector has to look at once.
_shared = functools.lru_cache(4096)(lambda names: names)


class Subtree:
    """A module and those below it, at construction.

    Attributes:
        modules: each once, and before those below it.
        names: of the attributes of each, without those of every module that stay as they are.
    """

    def __init__(self, module: Any) -> None:
        kept = _kept_by_torch()
        self.modules = [module]
        self.names: list[tuple[str, ...]] = []
        self._parents, self._places = [0], [""]  # the index of the module around each, and the name there
        seen = {id(module)}
        for index, one in enumerate(self.modules):
            self.names.append(_shared(tuple([name for name in vars(one) if name not in kept])))
            for place, child in one._modules.items():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    self.modules.append(child)
                    self._parents.append(index)
                    self._places.append(place)

    def path(self, index: int) -> str:
        """Of one of the modules, from the outermost one."""
        if index == 0:
            return ""
        return ".".join(filter(None, (self.path(self._parents[index]), self._places[index])))


class ModuleState:
    """The attributes of a module and of those below it, at construction.

    It holds the parameters and buffers that a call has used, as the graph of that call does. The running statistics of
    BatchNorm in training do not count: a forward changes them, and nothing that it computes depends on them.

    A step makes one for each call that it makes again: they are of few objects, or Python's collector would look for
    cycles twice as often.
    """

    def __init__(self, subtree: Subtree) -> None:
        self._subtree = subtree
        self._dicts: list[dict[str, Any]] = []  # four of each module
        self._names: list[tuple[str, ...]] = []  # in each of them, as far as they are looked at
        self._values: list[Any] = []  # under all of these
        self._statistics: list[tuple[dict[str, Any], list[str]]] = []  # the buffers of a module, and names among them
        tensors: list[Any] = []
        for one, names in zip(subtree.modules, subtree.names, strict=True):
            own = vars(one)
            parameters, buffers, modules = own["_parameters"], own["_buffers"], own["_modules"]
            self._dicts += (own, parameters, buffers, modules)
            self._names += (names, *(_shared(tuple(each)) for each in (parameters, buffers, modules)))
            self._values += map(own.__getitem__, names)
            self._values += (*parameters.values(), *buffers.values(), *modules.values())
            tensors += parameters.values()
            if not buffers:
                continue
            if updated := _statistics_of(one):
                self._statistics.append((buffers, updated))
            tensors += [each for name, each in buffers.items() if name not in updated]
        self._sizes = [*map(len, self._dicts)]
        self._contents = list(_contents_of(subtree))
        self._tensors = [tensor for tensor in tensors if tensor is not None]
        self._versions = [tensor._version for tensor in self._tensors]
        self._flags = [tensor.requires_grad for tensor in self._tensors]

    def difference(self) -> str:
        """The first attribute, or what is in one, that is another one now, as a noun; "" if there is none."""
        for index, (own, copy) in enumerate(self._pairs()):
            for name in {**own, **copy}:
                is_kept = name not in copy and name in _kept_by_torch()
                if not is_kept and (name not in own or name not in copy or not _are_same(own[name], copy[name])):
                    return f"the attribute {self._path(index, name)}"
        changed = (content for content in self._contents if content.has_changed())
        return next((f"what {self._path_of(content)} contains" for content in changed), "")

    def hidden(self) -> str:
        """The path of the first value that may change inside unseen, and its type; "" if there is none."""
        own = ((index, (name,), each) for index, name, each in _attributes_of(self._subtree))
        inside = ((content.index, content.names, each) for content in self._contents for each in content.parts())
        for index, names, each in (*own, *inside):
            if _is_hidden(each):
                return f"{_name((self._subtree.path(index), *names))}, a {type(each).__name__}"
        return ""

    def written(self) -> str:
        """The path of a parameter or buffer that has been written in place since; "" if there is none."""
        versions = [tensor._version for tensor in self._tensors]
        if versions == self._versions:
            return ""
        changed = next(
            one for one, *pair in zip(self._tensors, versions, self._versions, strict=True) if pair[0] != pair[1]
        )
        copies = enumerate(copy for _, copy in self._pairs())
        places = ((index, name) for index, copy in copies for name in copy if copy[name] is changed)
        return self._path(*next(places))

    def tensors(self) -> list[Any]:
        """The parameters and buffers, without running statistics."""
        return self._tensors

    def restore(self) -> None:
        """Puts the attributes back, what is in them, and which tensors need gradients."""
        for own, copy in self._changed():
            _assign(own, copy, _kept_by_torch())
        for content in self._contents:
            content.restore()
        _set_flags(self._tensors, self._flags)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within, the modules hold what they held: the program may have called `eval`, frozen parameters, or replaced
        them for the length of a call, as `torch.func.functional_call` does. At the end they hold what they do now: a
        second run ends early, perhaps between two changes of its own.
        """
        kept, changed = _kept_by_torch(), self._changed()
        swapped = [(own, own.copy()) for own, _ in changed]
        flags = [tensor.requires_grad for tensor in self._tensors]
        contents = [(content, content.now()) for content in self._contents if content.has_changed()]
        try:
            for own, copy in changed:
                _assign(own, copy, kept)
            for content, _ in contents:
                content.restore()
            _set_flags(self._tensors, self._flags)
            with self.without_statistics():
                yield
        finally:
            self.restore()
            for own, now in swapped:
                _assign(own, now)
            for _, content in contents:
                content.restore()
            _set_flags(self._tensors, flags)

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

    def _pairs(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Each dict, and what was in it as far as that is looked at."""
        values = iter(self._values)
        for own, names in zip(self._dicts, self._names, strict=True):
            yield own, dict(zip(names, itertools.islice(values, len(names)), strict=True))

    def _changed(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        are_in_order = [*map(tuple, self._dicts[3::4])] == self._names[3::4]  # the modules of a Sequential, say
        if are_in_order and self._sizes == [*map(len, self._dicts)]:
            missing = object()
            now = [
                own.get(name, missing) for own, names in zip(self._dicts, self._names, strict=True) for name in names
            ]
            if all(map(operator.is_, now, self._values)):
                return []
        kept = _kept_by_torch()
        found = []
        for own, copy in self._pairs():
            held = {name: value for name, value in own.items() if name in copy or name not in kept}
            if [*held] != [*copy] or not _are_identical(held, copy):
                found.append((own, copy))
        return found

    def _path_of(self, content: "_Content") -> str:
        return _name((self._subtree.path(content.index), *content.names))

    def _path(self, index: int, name: str) -> str:
        return _name((self._subtree.path(index // 4), name))


class _Content:
    """A container, or the attributes of an object, and what it holds at construction. It is in an attribute of the
    module with this index, under these names.
    """

    def __init__(self, index: int, names: Path, held: Any) -> None:
        self.index, self.names, self._held = index, names, held
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
        return _Content(self.index, self.names, self._held)

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
    """The attributes of every module that stay as they are, such as the dicts of hooks, whose content is for
    `module_objection`.
    """
    import torch

    return frozenset(vars(torch.nn.Module())) - {*_DICTS, "training", "_compiled_call_impl"}


@functools.cache
def _plain() -> set[type]:
    """Types of values that hold nothing."""
    import torch

    of_torch = (torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size, torch.memory_format)
    of_code = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, type)
    return {int, float, bool, complex, str, bytes, type(None), *of_torch, *of_code}


def _attributes_of(subtree: Subtree) -> Iterator[tuple[int, str, Any]]:
    """Modules, by their index, names and values of attributes that may hold something, as they are now."""
    plain = _plain()
    for index, (one, names) in enumerate(zip(subtree.modules, subtree.names, strict=True)):
        own = vars(one)
        for name in names:
            if name in own and type(own[name]) not in plain and name not in _DICTS:
                yield index, name, own[name]


def _contents_of(subtree: Subtree) -> Iterator[_Content]:
    seen: dict[int, int] = {}
    for index, name, value in _attributes_of(subtree):
        yield from _contents_in(index, (name,), value, seen, MOST_NESTED)


def _contents_in(index: int, names: Path, value: Any, seen: dict[int, int], depth: int) -> Iterator[_Content]:
    """seen: by identity, how deep it was looked at."""
    plain, kind = _plain(), type(value)
    if kind in plain or (kind is tuple and plain.issuperset(map(type, value))):
        return
    before = seen.get(id(value), 0)
    if depth <= before:
        return
    seen[id(value)] = depth
    if isinstance(value, _CONTAINERS):
        if not before:
            yield _Content(index, names, value)
        parts = [(names, part) for part in _parts(value) if type(part) not in plain]
    elif _is_object(value):
        if not before:
            yield _Content(index, names, vars(value))
        found = (*vars(value).items(), *_shared_by(kind))
        parts = [((*names, name), part) for name, part in found if type(part) not in plain]
    else:
        return
    for inner, part in parts:
        yield from _contents_in(index, inner, part, seen, depth - 1)


def _shared_by(kind: type) -> Iterator[tuple[str, Any]]:
    """Containers that all objects of a class have in common, without Python's own, such as `__dataclass_fields__`."""
    found = ((name, value) for name, value in vars(kind).items() if not name.startswith("__"))
    return ((name, value) for name, value in found if isinstance(value, _CONTAINERS) and not isinstance(value, tuple))


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


def _assign(own: dict[str, Any], values: dict[str, Any], kept: frozenset[str] = frozenset()) -> None:
    """Leaves alone what is kept. Never empties it in between: another thread may read it."""
    own.update(values)
    for name in own.keys() - values.keys() - kept:
        del own[name]
    if [name for name in own if name in values] != [*values]:
        for name in values:
            own[name] = own.pop(name)


def _set_flags(tensors: list[Any], flags: list[bool]) -> None:
    for tensor, flag in zip(tensors, flags, strict=True):
        if tensor.requires_grad != flag and tensor.is_leaf:
            tensor.requires_grad_(flag)
