"""The copies of weights in one forward pass of a thread: in a stream of their own, into slots on the device.

The thread is ahead of the device: when it calls a layer, the device still computes earlier ones, and the layer's weight
is copied meanwhile. Such a copy waits for two things. One is the layer that has used the slot before. The other is what
was queued before the pass began, or before this thread last wrote weights in it (csrc/torch/lms/write_watch.h).
"""

from typing import Any, Protocol

import torch

from ebbtide.lms.streaming.device import Device
from ebbtide.lms.streaming.step_copies import streams_of
from ebbtide.lms.streaming.step_parts import is_dense, round_up

SLOTS = 2  # one is computed with, one is copied to
LIMIT_PARTS = 16  # a slot is at most this part of the limit


class Writes(Protocol):
    """Of the extension, what tells of writes to weights in this thread."""

    def begin_write_watch(self) -> None: ...
    def end_write_watch(self) -> None: ...
    def take_written_weights(self) -> bool: ...


class Slot:
    """Memory on the device for the copy of one weight at a time."""

    def __init__(self, place: Any, size_bytes: int, stream: Any) -> None:
        self._stream = stream
        self._arrived, self._used = torch.cuda.Event(), torch.cuda.Event()
        self.is_busy = False  # also after an interrupt
        self.copy: Any = None  # of the weight
        self.buffer = torch.empty(size_bytes, dtype=torch.uint8, device=place)
        self._owners = _count_owners(self.buffer)

    def fill(self, weight: Any, side: Any) -> None:
        """Begins to copy the weight; what is queued from now on in the pass's stream comes after that."""
        self.is_busy = True
        flat = self.buffer[: weight.nbytes].view(weight.dtype)
        self.copy = flat.as_strided(weight.size(), weight.stride())
        side.wait_event(self._used)
        with torch.cuda.stream(side):
            self.copy.copy_(weight.detach(), non_blocking=True)
        self._arrived.record(side)
        self._stream.wait_event(self._arrived)

    def release(self) -> bool:
        """What uses the copy is queued. Whether the slot may be filled again, since nobody keeps the copy."""
        self.copy = None
        self._used.record(self._stream)
        self.is_busy = _count_owners(self.buffer) != self._owners
        return not self.is_busy


class Pass:
    """One forward pass on one device. Its slots count on the limit, and are given back with it."""

    def __init__(self, device: Device, place: Any, writes: Writes) -> None:
        self._device, self._place, self._writes = device, place, writes
        self._stream = torch.cuda.current_stream(place)
        self._side, *_ = streams_of(place)
        self._slots: list[Slot] = []  # the one that was filled longest ago first
        self._most_bytes = device.allowed_bytes() // LIMIT_PARTS
        self._slot_bytes = 0
        self._writes.begin_write_watch()
        self._side.wait_stream(self._stream)

    def begin(self, weight: Any) -> Slot | None:
        """A slot with a copy of the weight that has begun; None: it has to be copied in the current stream.

        Raises:
            torch.OutOfMemoryError: there is no room for a slot.
        """
        size_bytes = round_up(weight.nbytes)
        if size_bytes > self._most_bytes or not is_dense(weight):
            return None
        if torch.cuda.current_stream(self._place) != self._stream:
            return None
        slot = self._next_slot(size_bytes)
        if slot is not None:
            if self._writes.take_written_weights():
                self._side.wait_stream(self._stream)
            slot.fill(weight, self._side)
        return slot

    def release(self, slot: Slot) -> None:
        """The layer's work is queued."""
        if not slot.release() and slot in self._slots:
            self._slots.remove(slot)

    def end(self) -> None:
        """What is queued from now on comes after all copies, so that the slots' memory can be used again."""
        self._writes.end_write_watch()
        self._join()

    def _next_slot(self, size_bytes: int) -> Slot | None:
        self._slot_bytes = max(self._slot_bytes, size_bytes)
        if self._slots and self._slots[0].buffer.nbytes < size_bytes and not self._slots[0].is_busy:
            self._slots.pop(0)  # for a larger one: its copy is used up, or will be before its memory is used again
        if len(self._slots) < SLOTS:
            slot = self._device.optional(lambda: Slot(self._place, self._slot_bytes, self._stream))
            self._side.wait_stream(self._stream)  # whose memory it was until now
            self._slots.append(slot)
            return slot
        slot = self._slots[0]
        if slot.is_busy:
            return None
        self._slots.append(self._slots.pop(0))
        return slot

    def _join(self) -> None:
        if self._slots:
            self._stream.wait_stream(self._side)
            self._slots = []

    __del__ = _join  # of one that was not ended: an interrupt came, or LMS was switched off meanwhile


def _count_owners(tensor: Any) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
