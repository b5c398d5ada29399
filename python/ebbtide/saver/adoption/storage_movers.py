"""Moves one storage into the open region, in place.

- CUDA: the content goes to a copy in ordinary memory, the storage shrinks to nothing and grows again inside the region,
  and the content comes back. If the device runs out midway, the storage grows in ordinary memory again, in the block
  that it just left.
- Simulated device: the content goes to a new storage made inside the region, and the two exchange their memory.
"""

from typing import TYPE_CHECKING, Protocol

from ebbtide import _core, torch_extension
from ebbtide.saver.regions.region import disabled

if TYPE_CHECKING:
    import torch

_FLUSH_BYTES = 64 << 20  # old memory in torch's cache beyond which it is freed


class Mover(Protocol):
    """Moves storages of one kind of device; the caller has the region open."""

    def move(self, storage: "torch.UntypedStorage") -> None:
        """Moves one storage, or leaves it whole where it was."""

    def finish(self) -> None:
        """Frees the memory that the moves left behind."""


def make_mover(device_type: str) -> Mover:
    """The mover of "cuda" or "cpu"."""
    return CudaMover() if device_type == "cuda" else CpuMover()


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
            with disabled():
                copy = storage.clone()
            with _Emptied(storage, copy, size):
                storage.resize_(0)
                self._grow(storage, size)
                storage.copy_(copy)
        self._left_over += size
        if self._left_over >= _FLUSH_BYTES:
            del copy
            self.finish()

    def finish(self) -> None:
        """Frees the old memory, which torch has cached."""
        import torch

        with disabled():  # while a pool is open, torch empties that one only
            torch.cuda.empty_cache()
        self._left_over = 0

    def _grow(self, storage: "torch.UntypedStorage", size: int) -> None:
        import torch

        try:
            storage.resize_(size)
        except torch.OutOfMemoryError:
            self.finish()  # the old block is in torch's cache, out of a region's reach
            storage.resize_(size)


class _Emptied(_core.Scope):
    """While a storage is empty or half full, its bytes are in `copy`. If the block fails they are restored, however
    often an interrupt cuts that short.
    """

    def __init__(self, storage: "torch.UntypedStorage", copy: "torch.UntypedStorage", size: int) -> None:
        self._storage, self._size = storage, size
        self._source = copy

    def _open(self) -> None:
        """Nothing to do before the block."""

    def _close(self) -> Exception | None:
        if self._failure is None:
            return None
        try:
            with disabled():
                self._restore()
        except Exception as error:
            return error
        return None

    def _restore(self) -> None:
        import torch

        storage, size = self._storage, self._size
        if storage.nbytes() != size:
            try:
                storage.resize_(size)
            except (
                torch.OutOfMemoryError
            ):  # somebody took the block that was given back: use the copy's, which nobody else can take
                if self._source.device.type != "cpu":
                    on_device, self._source = self._source, self._source.cpu()
                    on_device.resize_(0)
                storage.resize_(size)
        storage.copy_(self._source)
        torch.cuda.synchronize()


def _as_tensor(storage: "torch.UntypedStorage") -> "torch.Tensor":
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
