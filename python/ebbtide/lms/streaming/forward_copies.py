"""Copies of weights on the host that modules use for a while (forward.py)."""

from collections import deque
from typing import Any

from ebbtide.lms.streaming.step_copies import copy, streams_of


class Lane:
    """Copies to one device, and back. Here: to a device whose work is done at once."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def begin_pass(self) -> None:
        """Copies from now on see what was written before."""

    def end_pass(self) -> None:
        """What the current stream does from now on comes after the copies back."""

    def copy_in(self, home: Any) -> tuple[Any, Any]:
        """Begins a copy. Returns it, and what `await_arrival` takes. Raises torch.OutOfMemoryError."""
        import torch

        visitor = torch.empty_like(home)
        copy(visitor, home)
        return visitor, None

    def await_arrival(self, arrived: Any) -> None:
        """What the current stream does from now on comes after the copy."""

    def release(self, home: Any, visitor: Any) -> None:
        """The module that used the copy has returned. `home`: where it is copied back to, or None."""
        if home is not None:
            copy(home, visitor)

    def await_room(self, room_bytes: int) -> None:
        """Waits until no more than that is in copies that were released and are still used by what is queued."""


class _CudaLane(Lane):
    """The processor is ahead of the device: without a bound, the memory of many modules would be in use at once."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self._in, self._out = streams_of(device)
        self._released: deque[tuple[Any, int]] = deque()
        self._released_bytes = 0
        self._written: dict[int, Any] = {}  # in this pass, by address: when the copy back is done
        self.begin_pass()

    def begin_pass(self) -> None:
        import torch

        self._in.wait_stream(torch.cuda.current_stream(self._device))
        self._in.wait_stream(self._out)
        self._written.clear()

    def end_pass(self) -> None:
        import torch

        torch.cuda.current_stream(self._device).wait_stream(self._out)

    def copy_in(self, home: Any) -> tuple[Any, Any]:
        import torch

        if (written := self._written.get(home.data_ptr())) is not None:
            self._in.wait_event(written)
        with torch.cuda.stream(self._in):  # whose pool the memory is of: it waits for no kernel
            visitor = torch.empty_like(home)
            copy(visitor, home)
        arrived = torch.cuda.Event()
        arrived.record(self._in)
        return visitor, arrived

    def await_arrival(self, arrived: Any) -> None:
        import torch

        torch.cuda.current_stream(self._device).wait_event(arrived)

    def release(self, home: Any, visitor: Any) -> None:
        import torch

        current = torch.cuda.current_stream(self._device)
        visitor.record_stream(current)
        used = torch.cuda.Event()
        used.record(current)
        if home is not None:
            self._out.wait_event(used)
            with torch.cuda.stream(self._out):
                copy(home, visitor)
            visitor.record_stream(self._out)
            used = torch.cuda.Event()
            used.record(self._out)
            self._written[home.data_ptr()] = used
        self._released.append((used, visitor.nbytes))
        self._released_bytes += visitor.nbytes

    def await_room(self, room_bytes: int) -> None:
        while self._released and (self._released_bytes > room_bytes or self._released[0][0].query()):
            used, size_bytes = self._released.popleft()
            used.synchronize()
            self._released_bytes -= size_bytes


def make_lane(device: Any) -> Lane:
    """For copies to that device."""
    return _CudaLane(device) if device.type == "cuda" else Lane(device)
