"""Moves one storage into the open region, in place.

- CUDA: torch's own `resize_` to the same size. It allocates inside the region, copies, and takes the new block over, in
  one call of C. If it fails or is interrupted, the storage is where it was, in the tag that it had.
- Simulated device: the content goes to a new storage made inside the region, and the two exchange their memory.
"""

from typing import TYPE_CHECKING, Protocol

from ebbtide import torch_extension
from ebbtide.saver.reclaim import torch_cache

if TYPE_CHECKING:
    import torch

_FLUSH_BYTES = 64 << 20  # old memory in torch's cache beyond which it is freed


class Mover(Protocol):
    """Moves storages of one kind of device; the caller has the region open."""

    def move(self, storage: "torch.UntypedStorage") -> None:
        """Moves one storage, or leaves it whole where it was."""

    def finish(self) -> None:
        """Frees the memory that the moves left behind."""


def make_mover(device_type: str, waits: bool = True) -> Mover:
    """The mover of "cuda" or "cpu".

    Args:
        device_type: of the storages.
        waits: False for storages that only the current stream uses, and others that torch was told of: a GPU's mover
            does not wait for the device then, nor free the old memory.
    """
    if device_type == "cuda":
        return CudaMover() if waits else StreamMover()
    return CpuMover()


class CpuMover:
    """Moves storages on the simulated device; the caller has the region open."""

    def __init__(self) -> None:
        self._exchange = torch_extension.load().exchange

    def move(self, storage: "torch.UntypedStorage") -> None:
        import torch

        # torch.UntypedStorage(size) would use torch's built-in allocator, not the installed one.
        fresh = torch.empty(storage.nbytes(), dtype=torch.uint8)
        fresh.untyped_storage().copy_(storage)
        self._exchange(_as_tensor(storage), fresh)

    def finish(self) -> None:
        """Nothing is left behind."""


class CudaMover:
    """Moves storages on a GPU; the caller has the region open."""

    def __init__(self) -> None:
        self._left_over = 0

    def move(self, storage: "torch.UntypedStorage") -> None:
        import torch

        size = storage.nbytes()
        with torch.cuda.device(storage.device):
            torch.cuda.synchronize()  # other streams may still use the old block
            try:
                storage.resize_(size)
            except torch.OutOfMemoryError:
                torch_cache.give_back()  # the old blocks are in torch's cache, out of a region's reach
                storage.resize_(size)
            torch.cuda.synchronize()  # the stream of the old block may be another one, which would reuse it too early
        self._left_over += size
        if self._left_over >= _FLUSH_BYTES:
            self.finish()

    def finish(self) -> None:
        """Frees the old memory, which torch has cached."""
        torch_cache.empty()
        self._left_over = 0


class StreamMover:
    """Moves storages on a GPU in the order of the current stream; the caller has the region open."""

    def move(self, storage: "torch.UntypedStorage") -> None:
        import torch

        with torch.cuda.device(storage.device):
            storage.resize_(storage.nbytes())

    def finish(self) -> None:
        """The old memory stays in torch's cache."""


def _as_tensor(storage: "torch.UntypedStorage") -> "torch.Tensor":
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
