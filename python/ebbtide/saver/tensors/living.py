"""The living tensors of this process and their holders, among the objects that Python's collector tracks."""

import gc
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePath
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from ebbtide import _core
from ebbtide.saver.tensors.walk import why_without_memory

if TYPE_CHECKING:
    import torch

Globals = dict[str, Any]
_CONTAINERS = (dict, list, tuple)
_MOST_DEPTH = 2  # of containers in containers that tensors are named in
_MOST_PARTS = 10_000  # longer ones are no containers of tensors


def living_objects(is_wanted: Callable[[type], bool], *hidden: Globals) -> list[Any]:
    """The objects of the wanted types that Python's collector tracks, including those that `gc.freeze` hides from its
    lists: whatever lives is referred to.

    Never a plain tuple: another thread may still be filling it, and then no other code may refer to it.

    Args:
        is_wanted: is asked once for each type of which an object lives.
        hidden: the globals of modules whose running functions don't count as users of their variables.
    """
    roots = _roots(hidden)
    return _core.living_objects([kind for kind in _core.living_types(roots) if is_wanted(kind)], roots)


def holds_or_names_tensors(kind: type) -> bool:
    """Whether `living_tensors` and `Holders` read objects of this type."""
    import torch

    kinds = kind.__mro__
    return kind is ModuleType or any(
        wanted in kinds for wanted in (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
    )


def _roots(hidden: Sequence[Globals]) -> list[Any] | None:
    """The roots of the objects that `gc.freeze` hides; None where it hides none. The collector does not traverse a
    running frame, so the variables of each are among them."""
    if not gc.get_freeze_count():
        return None
    return [sys.modules, *(list(variables.values()) for _, variables in _running_variables(hidden))]


def _running_variables(hidden: Sequence[Globals]) -> Iterator[tuple[FrameType, dict[str, Any]]]:
    for frame in _running_frames(hidden):
        names = frame.f_locals
        yield frame, dict(names)
        is_copy = isinstance(names, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
        # Before Python 3.13 the frame keeps the copy, with variables that the function deletes. A debugger writes it
        # back.
        if is_copy and frame.f_trace is None and sys.gettrace() is None:
            names.clear()


def _running_frames(hidden: Sequence[Globals]) -> Iterator[FrameType]:
    """All running frames except those of this file and of hidden modules, whose variables would count as owners."""
    own = threading.get_ident()
    tops = [sys._getframe(), *(frame for thread, frame in sys._current_frames().items() if thread != own)]
    left_out = {id(globals()), *map(id, hidden)}
    while tops:
        frame: FrameType | None = tops.pop()
        while frame is not None:
            if id(frame.f_globals) not in left_out:
                yield frame
            frame = frame.f_back


def living_tensors(objects: Iterable[Any]) -> "list[torch.Tensor]":
    """The tensors among these objects that hold bytes, and those that only torch refers to: gradients and the bases of
    views. Each once."""
    import torch

    is_tensor: dict[type, bool] = {}
    waiting = []
    for thing in objects:
        kind = type(thing)
        if is_tensor.get(kind) is None:
            is_tensor[kind] = torch.Tensor in kind.__mro__
        if is_tensor[kind]:
            waiting.append(thing)
    with torch._C.DisableTorchFunction():
        return _with_owned(waiting)


def _with_owned(waiting: "list[torch.Tensor]") -> "list[torch.Tensor]":
    found: dict[int, torch.Tensor] = {}
    while waiting:
        tensor = waiting.pop()
        if id(tensor) not in found and why_without_memory(tensor) is None:
            found[id(tensor)] = tensor
            waiting += [owned for owned in (gradient_of(tensor), _base_of(tensor)) if owned is not None]
    return list(found.values())


def ask(tensor: "torch.Tensor", name: str, otherwise: Any = None) -> Any:
    """torch.Tensor's own attribute of this name, called if it is a method; `otherwise` where torch raises an error.
    A subclass may have one of its own, which is code of the program and may raise anything."""
    import torch

    found = getattr(torch.Tensor, name)
    try:
        with torch._C.DisableTorchFunction():
            return found(tensor) if callable(found) else found.__get__(tensor)
    except RuntimeError:
        return otherwise


def storage_range(tensor: "torch.Tensor") -> tuple[int, int] | None:
    """Address and bytes of its storage; None where it has none, or an empty one."""
    storage = ask(tensor, "untyped_storage")
    try:
        return (storage.data_ptr(), storage.nbytes()) if storage is not None and storage.nbytes() else None
    except RuntimeError:  # a subclass without bytes of its own
        return None


def device_range(tensor: "torch.Tensor", device_type: str) -> tuple[int, int] | None:
    """The same; None also for tensors that must not be asked, and for those of another type of device."""
    is_there = why_without_memory(tensor) is None and ask(tensor, "device").type == device_type
    return storage_range(tensor) if is_there else None


def shape_of(tensor: "torch.Tensor") -> tuple[int, ...]:
    """() for a nested tensor: its sizes are a tensor that may be away as well."""
    return () if ask(tensor, "is_nested", True) else tuple(ask(tensor, "shape", ()))


def count_of(tensor: "torch.Tensor") -> int:
    """How many numbers it has; those of its storage for a nested tensor."""
    if not ask(tensor, "is_nested", True):
        return int(ask(tensor, "numel", 0))
    memory = storage_range(tensor)
    return 0 if memory is None else memory[1] // int(ask(tensor, "element_size", 1))


def dtype_of(tensor: "torch.Tensor") -> str:
    """ "float32"."""
    return str(ask(tensor, "dtype", "")).removeprefix("torch.")


def describe(tensor: "torch.Tensor") -> str:
    """Its type, shape and dtype: its name where nothing leads to it."""
    shape = "(nested)" if ask(tensor, "is_nested", True) else str(list(shape_of(tensor)))
    return f"{type(tensor).__name__}{shape} {dtype_of(tensor)}"


def gradient_of(tensor: "torch.Tensor") -> "torch.Tensor | None":
    """The gradient of a leaf, or of another tensor that retains it. None for one of several views that one function
    made, after a write to their base."""
    return ask(tensor, "grad") if ask(tensor, "is_leaf") or ask(tensor, "retains_grad") else None


def maker_of(tensor: "torch.Tensor") -> str:
    """The name of the autograd function that made it; "" for a leaf, and for such a view."""
    maker = ask(tensor, "grad_fn")
    return "" if maker is None else str(maker.name())


def _base_of(tensor: "torch.Tensor") -> "torch.Tensor | None":
    return ask(tensor, "_base") if ask(tensor, "_is_view") else None


def _parts_of(tensor: "torch.Tensor") -> "list[torch.Tensor]":
    """The tensors that a wrapper (DTensor, for one) holds; none for a plain one."""
    names = getattr(type(tensor), "__tensor_flatten__", None)
    try:
        return [] if names is None else [getattr(tensor, name) for name in names(tensor)[0]]
    except Exception:  # the wrapper's own code
        return []


def _places_in_groups(optimizer: Any) -> "Iterator[tuple[str, torch.Tensor]]":
    """The parameters of an optimizer, each with its place."""
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        for index, parameter in enumerate(group["params"]):
            yield f"parameter {index} of group {number}", parameter


def _is_plain(key: Any) -> bool:
    """Whether it can be shown: the `repr` of others is the program's code."""
    return type(key) in (int, str)


class Holders:
    """Names that lead to tensors: attributes of modules, states of optimizers, variables, and else the kind of object
    refers to them."""

    def __init__(self, objects: Iterable[Any], *hidden: Globals) -> None:
        import torch

        modules, optimizers, namespaces = [], [], []
        for thing in objects:
            kinds = type(thing).__mro__
            if torch.nn.Module in kinds:
                modules.append(thing)
            elif torch.optim.Optimizer in kinds:
                optimizers.append(thing)
            elif type(thing) is ModuleType:
                namespaces.append(thing)
        self._tensor = torch.Tensor
        self._hidden = hidden
        self._names: dict[int, str] = {}
        self._registered: set[int] = set()  # by id()
        self._own_names = frozenset(vars(torch.nn.Module()))
        self._read_modules(modules)
        self._read_optimizers(optimizers)
        for frame, variables in _running_variables(hidden):
            code = frame.f_code
            if code.co_flags & inspect.CO_OPTIMIZED:  # a function's; a module's variables are its globals
                where = f"in {code.co_name} ({PurePath(code.co_filename).name}:{frame.f_lineno})"
                self._read_variables((name, f" {where}", value) for name, value in variables.items())
        for module in namespaces:
            own = [(name, value) for name, value in vars(module).items() if name != "__builtins__"]  # in each module
            self._read_variables((f"{module.__name__}.{name}", "", value) for name, value in own)
        self._read_groups(optimizers)

    def _read(self, named: Iterable[tuple[str, Any]]) -> None:
        waiting = list(named)
        for name, value in waiting:
            if self._tensor in type(value).__mro__:
                self._names.setdefault(id(value), name)
                waiting += [(name, part) for part in _parts_of(value) if id(part) not in self._names]

    def _read_variables(self, named: Iterable[tuple[str, str, Any]]) -> None:
        """Names with their suffixes and values, also of items of plain containers, and of containers in these."""
        waiting = [(name, end, value, 0) for name, end, value in named]
        while waiting:
            name, end, value, depth = waiting.pop()
            self._read([(name + end, value)])
            if type(value) in _CONTAINERS and depth < _MOST_DEPTH and len(value) <= _MOST_PARTS:
                parts = list(value.items()) if type(value) is dict else list(enumerate(value))
                waiting += [(f"{name}[{key!r}]", end, part, depth + 1) for key, part in parts if _is_plain(key)]

    def _read_modules(self, modules: list[Any]) -> None:
        children = {id(child) for module in modules for child in module.__dict__.get("_modules", {}).values()}
        for root in [module for module in modules if id(module) not in children]:
            paths = list(root.named_modules(prefix=type(root).__name__))
            is_model = any(module._parameters for _, module in paths)
            for path, module in paths:
                for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                    self._read([(f"{path}.{name}", tensor)])
                    gradient = None if tensor is None else gradient_of(tensor)
                    self._read([(f"the gradient of {path}.{name}", gradient)])
                    self._register([tensor] * is_model)
                others = ((name, value) for name, value in list(vars(module).items()) if name not in self._own_names)
                self._read_variables((f"{path}.{name}", "", value) for name, value in others)

    def _register(self, waiting: list[Any]) -> None:
        while waiting:
            tensor = waiting.pop()
            self._registered.add(id(tensor))
            waiting += _parts_of(tensor)

    def _read_optimizers(self, optimizers: list[Any]) -> None:
        for optimizer in optimizers:
            places = {id(parameter): place for place, parameter in _places_in_groups(optimizer)}
            for parameter, state in list(optimizer.state.items()):
                whose = self._names.get(id(parameter)) or places.get(id(parameter), "a parameter")
                values = state.items() if isinstance(state, dict) else ()
                self._read((f"{type(optimizer).__name__} {key} of {whose}", value) for key, value in values)

    def _read_groups(self, optimizers: list[Any]) -> None:
        """Names the parameters that nothing else names, and their gradients."""
        for optimizer in optimizers:
            for place, parameter in _places_in_groups(optimizer):
                self._read([(f"{type(optimizer).__name__} {place}", parameter)])
                name = self._names.get(id(parameter), place)
                self._read([(f"the gradient of {name}", gradient_of(parameter))])

    def name_others(self, groups: "Iterable[list[torch.Tensor]]", own: Sequence[Any]) -> None:
        """Names those of groups without a name by the kinds of objects that refer to them, except `own`."""
        groups = list(groups)
        unnamed = [tensor for group in groups if not any(map(self.name_of, group)) for tensor in group]
        if not unnamed:
            return
        kinds = _core.referrer_types(unnamed, [*own, *groups, groups], _roots(self._hidden))
        for tensor, kind in zip(unnamed, kinds, strict=True):
            if kind is not None:
                self._names[id(tensor)] = f"a {kind.__name__}"

    def is_registered(self, tensor: "torch.Tensor") -> bool:
        """Whether it is a parameter or a buffer of a model, which is a module that has parameters; or a part of one."""
        return id(tensor) in self._registered

    def name_of(self, *tensors: "torch.Tensor") -> str:
        """A name that leads to one of them, the first if it has one; or ""."""
        return next(filter(None, [self._names.get(id(tensor), "") for tensor in tensors]), "")


def storages(
    is_wanted: Callable[[int, int], bool], *hidden: Globals
) -> "tuple[dict[int, list[torch.Tensor]], Holders]":
    """The living tensors by the address of their storage, and their holders.

    Args:
        is_wanted: whether a storage is, by its address and bytes.
        hidden: as in `living_objects`.
    """
    objects = living_objects(holds_or_names_tensors, *hidden)
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in living_tensors(objects):
        memory = storage_range(tensor)
        if memory is not None and is_wanted(*memory):
            groups.setdefault(memory[0], []).append(tensor)
    holders = Holders(objects, *hidden)
    holders.name_others(groups.values(), [objects, groups])
    return groups, holders
