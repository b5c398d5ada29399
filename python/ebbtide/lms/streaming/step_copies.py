"""The copies of a step that runs in pieces (optimizer_step.py): into slots on the device, and back."""

from collections.abc import Iterator
from typing import Any

from ebbtide import _core
from ebbtide.lms.streaming.device import Device
from ebbtide.lms.streaming.step_parts import Chunk, Staged, round_up

SLOTS = 3  # one is copied in, one is computed, one is copied out


def copy(to: Any, source: Any) -> None:
    """In the current stream."""
    to.copy_(source, non_blocking=True)


class Lanes:
    """The slots of one device, and the copies in and out of them. Here: of a device whose work is done at once."""

    def __init__(self, device: Any, slot_bytes: int, home: Any = None) -> None:
        import torch

        self.slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self.copied_bytes = 0  # in
        self._next = 0

    def follow(self, stream: Any) -> None:
        """The next copies in come after what is queued there now."""

    def copy_in(self, chunk: Chunk) -> None:
        """Gives the chunk the next slot, and begins to copy it in once the slot is free."""
        self._assign(chunk)
        self._copy_in(chunk)

    def await_copy_in(self, chunk: Chunk) -> None:
        """What is queued from now on comes after it."""

    def copy_out(self, chunk: Chunk) -> None:
        """Begins to copy back."""
        self._copy_out(chunk)

    def join(self) -> None:
        """What is queued from now on comes after all copies. It may be repeated."""

    def _assign(self, chunk: Chunk) -> None:
        chunk.slot = self._next
        self._next = (self._next + 1) % SLOTS
        offset = 0
        for piece in chunk.pieces:
            for staged in piece.staged:
                size_bytes = staged.size_bytes
                staged.visitor = self.slots[chunk.slot][offset : offset + size_bytes].view(staged.home.dtype)
                offset += round_up(size_bytes)
            piece.prepare()

    def _copy_in(self, chunk: Chunk) -> None:
        for staged in _staged_of(chunk):
            copy(staged.visitor, staged.home)
            self.copied_bytes += staged.size_bytes

    def _copy_out(self, chunk: Chunk) -> None:
        for staged in _staged_of(chunk):
            if staged.goes_back:
                copy(staged.home, staged.visitor)


class _CudaLanes(Lanes):
    """With a stream for each direction. Kernels are in the current stream, and the slots' memory is that of `home`."""

    def __init__(self, device: Any, slot_bytes: int, home: Any = None) -> None:
        import torch

        with torch.cuda.stream(home):
            super().__init__(device, slot_bytes)
        self._current = torch.cuda.current_stream(device)
        self._in, self._out, _ = streams_of(device)
        self._arrived = [torch.cuda.Event() for _ in self.slots]
        self._computed = torch.cuda.Event()
        self._left = [torch.cuda.Event() for _ in self.slots]
        self._in.wait_stream(self._current)
        if home is not None:  # what left to make room for the slots is on its way in the order of that
            self._in.wait_stream(home)
        self._in.wait_stream(self._out)  # of an earlier step that ended early

    def follow(self, stream: Any) -> None:
        self._in.wait_stream(stream)

    def copy_in(self, chunk: Chunk) -> None:
        import torch

        self._assign(chunk)
        self._in.wait_event(self._left[chunk.slot])  # of the chunk before; none where it is the first one
        with torch.cuda.stream(self._in):
            self._copy_in(chunk)
        self._arrived[chunk.slot].record(self._in)

    def await_copy_in(self, chunk: Chunk) -> None:
        self._current.wait_event(self._arrived[chunk.slot])

    def copy_out(self, chunk: Chunk) -> None:
        import torch

        self._computed.record(self._current)
        self._out.wait_event(self._computed)
        with torch.cuda.stream(self._out):
            self._copy_out(chunk)
        self._left[chunk.slot].record(self._out)

    def join(self) -> None:
        self._current.wait_stream(self._in)
        self._current.wait_stream(self._out)


class Staging:
    """The lanes of the steps that belong together, by device, as chunks come.

    homes: by device, the stream whose memory the slots are; if it is not the current one.
    """

    def __init__(self) -> None:
        self.homes: dict[Any, Any] = {}
        self.slot_bytes = 0
        self._lanes: dict[Any, Lanes] = {}
        self._short: set[Any] = set()  # devices without room for slots

    @property
    def copied_bytes(self) -> int:
        """In."""
        return sum(lane.copied_bytes for lane in self._lanes.values())

    @property
    def is_short(self) -> bool:
        """Whether there was no room for slots."""
        return bool(self._short)

    def forget_shortage(self) -> None:
        """The next step asks for room again."""
        self._short.clear()

    def lane_of(self, kind: Any, device: Device) -> Lanes | None:
        """None: there is no room for its slots."""
        import torch

        if kind not in self._lanes and kind not in self._short:
            try:
                self._lanes[kind] = device.optional(lambda: make_lanes(kind, self.slot_bytes, self.homes.get(kind)))
            except torch.OutOfMemoryError:
                self._short.add(kind)
        return self._lanes.get(kind)

    def follow(self, kind: Any, stream: Any) -> None:
        """The next copies in come after what is queued there now."""
        if (lane := self._lanes.get(kind)) is not None:
            lane.follow(stream)

    def join(self) -> None:
        """What is queued from now on comes after all copies: so the slots can be given back."""
        for lane in self._lanes.values():
            lane.join()


class Joined(_core.Scope):
    """Whatever ends the block, what follows it comes after all copies."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    def _open(self) -> None:
        pass

    def _close(self) -> None:
        self._staging.join()


def _staged_of(chunk: Chunk) -> Iterator[Staged]:
    for piece in chunk.pieces:
        yield from piece.staged


_streams: dict[Any, tuple[Any, Any, Any]] = {}  # by device


def streams_of(device: Any) -> tuple[Any, Any, Any]:
    """For copies to the device, copies back, and updates beside a backward."""
    import torch

    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device)
    return _streams[device]


def current_stream(device: Any) -> Any:
    """None: its work is done at once."""
    import torch

    return torch.cuda.current_stream(device) if has_streams(device) else None


def has_streams(device: Any) -> bool:
    """Whether work on it is queued."""
    return bool(device.type == "cuda")


def make_lanes(device: Any, slot_bytes: int, home: Any = None) -> Lanes:
    """home: the stream whose memory the slots are; None: the current one."""
    return (_CudaLanes if has_streams(device) else Lanes)(device, slot_bytes, home)
