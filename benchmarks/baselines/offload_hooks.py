"""A user's own solution: saved-tensor hooks over whole storages, side streams both ways, and a look-ahead.

First come, first offloaded, until `quota_bytes` have left in a step; backward loads `ahead_bytes` ahead of need, and
forward waits for copies beyond so many bytes. So the device holds up to `ahead_bytes` more than the quota leaves.
Good enough for a model whose steps are all equal and whose saved tensors have no other holder.
"""

from collections import deque
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class _Saved:
    """One storage that left, or is about to."""

    def __init__(self, storage: torch.UntypedStorage, stream: torch.cuda.Stream) -> None:
        self.size_bytes, self.device = storage.nbytes(), storage.device
        self.host = torch.empty(self.size_bytes, dtype=torch.uint8, pin_memory=True)
        self.on_device: torch.Tensor | None = None
        self.loaded: torch.cuda.Event | None = None
        stream.wait_stream(torch.cuda.current_stream())
        self._source: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        with torch.cuda.stream(stream):
            self.host.copy_(self._source, non_blocking=True)
            self._copied = stream.record_event()

    def leave(self) -> None:
        """The next allocation in this stream may have its memory."""
        torch.cuda.current_stream().wait_event(self._copied)
        self._source = None

    def load(self, stream: torch.cuda.Stream) -> None:
        if self.on_device is not None:
            return
        self.on_device = torch.empty(self.size_bytes, dtype=torch.uint8, device=self.device)
        stream.wait_stream(torch.cuda.current_stream())
        stream.wait_event(self._copied)
        with torch.cuda.stream(stream):
            self.on_device.copy_(self.host, non_blocking=True)
            self.loaded = stream.record_event()
        self.on_device.record_stream(stream)


class KnownStorages:
    """The record of a storage, as long as it lives: its address, and so its memory, is another's afterwards."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[StorageWeakRef, Any]] = {}

    def find(self, storage: torch.UntypedStorage) -> Any:
        reference, noted = self._noted.get(storage._cdata, (None, None))
        return None if reference is None or reference.expired() else noted

    def note(self, storage: torch.UntypedStorage, noted: Any) -> None:
        self._noted[storage._cdata] = StorageWeakRef(storage), noted  # _cdata is not used again while this lives


class OffloadHooks(torch.autograd.graph.saved_tensors_hooks):
    """Open it around forward and backward; call `begin_step` before each step."""

    def __init__(self, quota_bytes: int, ahead_bytes: int, least_bytes: int = 1 << 20) -> None:
        self._quota, self._ahead, self._least = quota_bytes, ahead_bytes, least_bytes
        self._out, self._in = torch.cuda.Stream(), torch.cuda.Stream()
        self.moved_bytes = 0
        self.begin_step()
        super().__init__(self._pack, self._unpack)

    def begin_step(self) -> None:
        self._known = KnownStorages()
        self._order: list[_Saved] = []
        self._leaving: deque[_Saved] = deque()
        self._leaving_bytes = 0
        self.moved_bytes = 0

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if not tensor.is_cuda or tensor.is_leaf or storage.nbytes() < self._least:
            return tensor
        saved = self._known.find(storage)
        if saved is None and self.moved_bytes + storage.nbytes() > self._quota:
            return tensor
        if saved is None:
            saved = _Saved(storage, self._out)
            self._known.note(storage, saved)
            self._order.append(saved)
            self.moved_bytes += saved.size_bytes
            self._leave(saved)
        return saved, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _leave(self, saved: _Saved) -> None:
        self._leaving.append(saved)
        self._leaving_bytes += saved.size_bytes
        while self._leaving_bytes > self._ahead:
            first = self._leaving.popleft()
            self._leaving_bytes -= first.size_bytes
            first.leave()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        while self._leaving:
            self._leaving.popleft().leave()
        saved, dtype, size, stride, offset = packed
        while self._order and saved in self._order:
            self._order.pop().load(self._in)
        ahead = 0
        while self._order and ahead + self._order[-1].size_bytes <= self._ahead:
            ahead += self._order[-1].size_bytes
            self._order.pop().load(self._in)
        torch.cuda.current_stream().wait_event(saved.loaded)
        return torch.empty(0, dtype=dtype, device=saved.device).set_(
            saved.on_device.untyped_storage(), offset, size, stride
        )
