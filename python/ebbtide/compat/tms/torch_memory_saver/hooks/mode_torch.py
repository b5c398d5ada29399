"""The entry points of torch_memory_saver for torch's pools: the symbols `tms_torch_malloc` and `tms_torch_free`."""

from typing import Any

from torch_memory_saver.hooks.base import HookUtilBase


class HookUtilModeTorch(HookUtilBase):
    """For pools of the caller's own: `torch.cuda.MemPool(allocator=HookUtilModeTorch().get_allocator())`. Their memory
    has the tag and the backup of the thread that allocates it. Regions do not need it."""

    _allocator: Any = None  # torch before 2.10 does not keep it

    def get_allocator(self) -> Any:
        """torch's allocator. Needs a CUDA build of torch."""
        if self._allocator is None:
            from torch.cuda.memory import CUDAPluggableAllocator

            self._allocator = CUDAPluggableAllocator(self.get_path_binary(), "tms_torch_malloc", "tms_torch_free")
        return self._allocator.allocator()
