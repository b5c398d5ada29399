"""What LMS cannot move, and why: for its report, and for errors when memory is short.

It moves a parameter or a gradient only if nothing else knows its memory.
"""

import sys
import weakref
from collections import Counter
from typing import Any

from ebbtide import _core
from ebbtide.lms.devices import Device
from ebbtide.locks import make_lock
from ebbtide.sizes import format_size

STATES, WEIGHTS, COMPILED = "optimizer states", "weights", "saved tensors of compiled models"
SHARED = "something else refers to their memory: a checkpoint that is still held, a view, or a graph"
NOT_OWN = "another library owns their memory, NumPy may refer to it, or torch.load made it on the simulated device"
NO_ROOM = "they found no room"
WHOLE = "a model that is compiled as a whole holds them until its forward ends: compile its blocks instead"
_PAGE = "docs/lms.md#what-cannot-leave"


class _Noted:
    """Of one kind: bytes by reason, by optimizer or module. Not all of those can be hashed or live on."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], Counter[str]]] = {}
        self._gone: list[int] = []  # owners, noted by the collector at any moment
        self.total: Counter[str] = Counter()

    def has(self, owner: Any) -> bool:
        entry = self._entries.get(id(owner))
        return entry is not None and entry[0]() is owner

    def replace(self, owner: Any, sizes: Counter[str]) -> bool:
        """Whether that changes something."""
        self.forget_gone()
        key = id(owner)
        before = self._entries.get(key, (None, Counter[str]()))[1]
        if dict(before) == dict(sizes):  # counters take 0 for nothing
            return False
        self._drop(key)
        if sizes:
            self._entries[key] = weakref.ref(owner, lambda _: self._gone.append(key)), sizes
            self.total.update(sizes)
        return True

    def forget_gone(self) -> None:
        while self._gone:
            key = self._gone.pop()
            if key in self._entries and self._entries[key][0]() is None:
                self._drop(key)

    def _drop(self, key: int) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.total.subtract(entry[1])
        still = {reason for _, sizes in self._entries.values() for reason in sizes} if 0 in entry[1].values() else ()
        self.total = Counter({reason: size for reason, size in self.total.items() if size or reason in still})

    @property
    def count(self) -> int:
        return len(self._entries)


_lock = make_lock()
_noted = {kind: _Noted() for kind in (STATES, WEIGHTS, COMPILED)}


def note(extension: Any, kind: str, owner: Any, sizes: Counter[str]) -> None:
    """Of an optimizer or a module: bytes by reason, 0 where that is unknown. Replaces what was noted of it before."""
    with _lock:
        if _noted[kind].replace(owner, sizes):
            extension.note_outside(_describe_all())


def has(owner: Any) -> bool:
    """Whether something was noted of a module."""
    with _lock:
        return _noted[WEIGHTS].has(owner)


def forget(extension: Any) -> None:
    """At the end of LMS."""
    with _lock:
        _noted.update((kind, _Noted()) for kind in (STATES, WEIGHTS, COMPILED))
        extension.note_outside("")


def rows() -> list[tuple[str, int, str]]:
    """Kind, bytes and reason."""
    with _lock:
        return _rows()


def _rows() -> list[tuple[str, int, str]]:
    found = []
    for kind, noted in _noted.items():
        noted.forget_gone()
        # Several compiled modules that no module calls are the blocks of a model that is no module itself.
        if kind != COMPILED or noted.count == 1:
            found += [(kind, size, reason) for reason, size in noted.total.most_common()]
    return found


def _describe_all() -> str:
    """One sentence for an error; "" where nothing lies outside."""
    parts = [
        f"{format_size(size)} of {kind} can't leave ({reason})" if size else f"{kind} can't leave ({reason})"
        for kind, size, reason in _rows()
    ]
    return f"{'; '.join(parts)}: see {_PAGE}" if parts else ""


class Owners:
    """Compares a tensor's owners with those of one that nothing else knows."""

    def __init__(self, device: Device) -> None:
        import torch

        self._device = device
        probe = torch.nn.Parameter(torch.empty(1))
        probe.grad = torch.empty(1)
        self._of_parameter, self._of_gradient = _count(probe), _count(probe.grad)

    def is_parameter_alone(self, parameter: Any) -> bool:
        return self._is_own(parameter) and _count(parameter) == self._of_parameter

    def is_gradient_alone(self, gradient: Any) -> bool:
        return self._is_own(gradient) and _count(gradient) == self._of_gradient

    def sort(self, parameters: list[Any], tag: str) -> Counter[str]:
        """How many bytes of those that have not got memory of the tag have which reason."""
        sizes: Counter[str] = Counter()
        for parameter in parameters:
            info = _core.find(parameter.data_ptr())
            if info is None or info.tag != tag:
                sizes[self._reason(parameter, info)] += parameter.nbytes
        return sizes

    def _reason(self, parameter: Any, info: Any) -> str:
        if info is not None and not self._device.is_ordinary(parameter):
            return f"they have the tag {info.tag!r}"
        if not self._is_own(parameter):
            return NOT_OWN
        return NO_ROOM if self.is_parameter_alone(parameter) else SHARED

    def _is_own(self, tensor: Any) -> bool:
        # A storage that was lent to NumPy can't be resized.
        return self._device.is_ordinary(tensor) and bool(tensor.untyped_storage().resizable())


def _count(tensor: Any) -> tuple[int, ...]:
    """Of the tensor, of its storage, and of the storage's Python object. What torch itself owns of them depends on its
    version.
    """
    import torch

    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
