"""Who keeps tensors and lets their device memory go and come back: ebbtide here, the baselines in baselines/."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from ebbtide import saver
from ebbtide.compat.torch_memory_saver import install

from benchmarks import tensors as kept
from benchmarks.tensors import Shape

_numbers = itertools.count(1)


class Keeper(ABC):
    """Makes tensors, pauses and resumes them.

    Attributes:
        has_backup: the content comes back.
        keeps_addresses: resume promises the same ones.
        drops_to_zeros: memory without a backup comes back as zeros.
    """

    has_backup = True
    keeps_addresses = True
    drops_to_zeros = False

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    @abstractmethod
    def make(self, shapes: Sequence[Shape]) -> None:
        """Fills `tensors`, uninitialised."""

    @abstractmethod
    def pause(self) -> None:
        """Returns once the device memory is free for others."""

    @abstractmethod
    def resume(self) -> None:
        """Returns once the bytes are right, or will be for later work of the current stream."""

    def faults(self) -> list[str]:
        """Differences between the reports of the last pause and resume and the request."""
        return []

    def facts(self) -> dict[str, Any]:
        """What explains the figures."""
        return {}


class Ebbtide(Keeper):
    """`saver`, with a region of the given policy (backup=, retain=).

    Args:
        tag: its tag; by default a new one for each keeper.
        copies_all: every byte is expected to move: a report that says otherwise is a fault.
    """

    def __init__(self, tag: str | None = None, copies_all: bool = True, **policy: Any) -> None:
        super().__init__()
        self.tag = tag or f"weights-{next(_numbers)}"
        self.has_backup = policy.get("backup", "ram") is not None
        self.drops_to_zeros = not self.has_backup
        self._policy = policy
        self._copies_all = copies_all and self.has_backup
        self._reports: list[Any] = []

    def make(self, shapes: Sequence[Shape]) -> None:
        with saver.region(self.tag, **self._policy):
            self.tensors = kept.make(shapes)

    def pause(self) -> None:
        self._reports = [saver.pause(self.tag)]

    def resume(self) -> None:
        self._reports.append(saver.resume(self.tag))

    def faults(self) -> list[str]:
        size = sum(tensor.nbytes for tensor in self.tensors)
        moved = [report.bytes for report in self._reports]
        copied = [report.copied for report in self._reports]
        faults = []
        # A resume leaves out segments in which nothing lives.
        if any(count < size or count > moved[0] for count in moved):
            faults.append(f"pause and resume speak of {moved} bytes, the tensors have {size}")
        if self._copies_all and any(count < size for count in copied):
            faults.append(f"{copied} bytes were copied where all {size} should have been")
        return faults

    def facts(self) -> dict[str, Any]:
        return {"copied_bytes": [report.copied for report in self._reports]}


class DropIn(Keeper):
    """Ebbtide through torch_memory_saver's calls (`enable_cpu_backup` as `backup`, `retain_cpu_backup` as `retain`).

    Args:
        backend: of its CPU backup: "mmap" is the saver's "ram", "pinned" its "pinned".
    """

    def __init__(self, backup: bool = True, retain: bool = False, backend: str = "mmap") -> None:
        super().__init__()
        self.has_backup, self.drops_to_zeros = backup, not backup
        self._tag = f"weights-{next(_numbers)}"
        self._backend = backend if backup else None
        self._saver = install().torch_memory_saver
        if retain:
            self._saver.retain_cpu_backup = True

    def make(self, shapes: Sequence[Shape]) -> None:
        with self._saver.region(self._tag, enable_cpu_backup=self.has_backup, cpu_backup_backend=self._backend):
            self.tensors = kept.make(shapes)

    def pause(self) -> None:
        self._saver.pause(self._tag)

    def resume(self) -> None:
        self._saver.resume(self._tag)
