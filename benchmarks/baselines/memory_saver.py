"""torch_memory_saver from PyPI as it is, in torch mode.

At exit it aborts in this mode (status 1, or a signal): results are written before.
"""

import functools
import importlib.metadata
import importlib.util
import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks import device
from benchmarks import tensors as kept
from benchmarks.keepers import Keeper
from benchmarks.measured import SkippedError
from benchmarks.tensors import Shape

_numbers = itertools.count(1)


@functools.cache
def library() -> Any:
    """Its one object. The mode can only be chosen before its first use."""
    from torch_memory_saver import torch_memory_saver

    torch_memory_saver.hook_mode = "torch"
    return torch_memory_saver


class MemorySaver(Keeper):
    """`enable_cpu_backup` as `backup`, `retain_cpu_backup` as `retain`."""

    def __init__(self, backup: bool = True, retain: bool = False) -> None:
        super().__init__()
        if importlib.util.find_spec("torch_memory_saver") is None:
            raise SkippedError("torch_memory_saver is not installed: pip install torch_memory_saver==0.0.10")
        device.need_gpu("torch_memory_saver calls the CUDA runtime")
        self.has_backup = backup
        self._tag = f"weights-{next(_numbers)}"
        self._saver = library()
        if retain:
            self._saver.retain_cpu_backup = True

    def make(self, shapes: Sequence[Shape]) -> None:
        with self._saver.region(tag=self._tag, enable_cpu_backup=self.has_backup):
            self.tensors = kept.make(shapes)

    def pause(self) -> None:
        self._saver.pause(self._tag)

    def resume(self) -> None:
        self._saver.resume(self._tag)

    def facts(self) -> dict[str, Any]:
        return {"version": importlib.metadata.version("torch_memory_saver")}
