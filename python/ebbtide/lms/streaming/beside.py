"""The streams of updates inside a backward (backward_steps.py), beside what the backward computes.

An update is queued as a whole when its gradients are there, so that it is done even if the backward fails then. What
the backward computes next waits for none of it, but that the memory of gradients is used again only once they are.
"""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ebbtide.lms.streaming.optimizer_step import keeping
from ebbtide.lms.streaming.step_copies import Staging

HELD = 2  # updates whose gradients may wait for copies while the backward goes on


def has_streams(device: Any) -> bool:
    """Whether work on it is queued."""
    return bool(device.type == "cuda")


class Beside:
    """The updates of one backward. On a device whose work is done at once they only share their slots."""

    def __init__(self) -> None:
        self._staging = Staging()
        self._streams: dict[Any, tuple[Any, set[Any]]] = {}  # by device: ours, and those that it was beside
        self._held: deque[tuple[list[tuple[Any, Any]], list[Any]]] = deque()  # ends of updates, and their gradients

    def run(self, gradients: list[Any], update: Callable[[], None]) -> None:
        """Queues it after what is queued now."""
        import torch

        streams = {device: self._begin(device) for device in _devices_of(gradients)}
        with ExitStack() as entered:
            for ours, _ in streams.values():
                entered.enter_context(torch.cuda.stream(ours))
            with keeping(self._staging):
                update()
        if streams:
            self._hold(streams, gradients)

    def close(self) -> None:
        """What is queued from now on comes after all updates. It can be called again, and in a callback of Python's
        collector.
        """
        import torch

        self._staging.join()
        while self._streams:
            device, (ours, others) = self._streams.popitem()
            for stream in {*others, torch.cuda.current_stream(device)}:
                stream.wait_stream(ours)
        self._held.clear()
        self._staging = Staging()

    def _begin(self, device: Any) -> tuple[Any, Any]:
        """Our stream, whose work comes after what is queued now, and the one that it is beside."""
        import torch

        backward = torch.cuda.current_stream(device)
        if device not in self._streams:
            if device not in _streams:
                _streams[device] = torch.cuda.Stream(device)
            self._streams[device] = _streams[device], set()
        ours, others = self._streams[device]
        others.add(backward)
        ours.wait_stream(backward)
        self._staging.homes[device] = backward
        self._staging.follow(device, backward)
        return ours, backward

    def _hold(self, streams: dict[Any, tuple[Any, Any]], gradients: list[Any]) -> None:
        """Memory of gradients is the backward's."""
        import torch

        ends = [(torch.cuda.Event(), backward) for _, backward in streams.values()]
        for (end, _), (ours, _) in zip(ends, streams.values(), strict=True):
            end.record(ours)
        self._held.append((ends, gradients))
        if len(self._held) > HELD:
            ends, _ = self._held.popleft()
            for end, backward in ends:
                backward.wait_event(end)


def _devices_of(gradients: list[Any]) -> set[Any]:
    return {each.device for each in gradients if has_streams(each.device)}


_streams: dict[Any, Any] = {}  # by device
