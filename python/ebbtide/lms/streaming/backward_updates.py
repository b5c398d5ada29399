"""The updates inside one backward (backward_steps.py): they run in a stream of their own, beside what it computes.

An update is queued as a whole when its gradients are there, so that it is done even if the backward fails then. What
the backward computes next does not wait for it. The order on a device:

- An update, and the copies in for it, come after the streams that made its gradients.
- Slots are memory of such a stream: copies into them come after what was queued there until they were allocated.
- A stream that made gradients waits for their update before it uses their memory again, two updates later.
- What follows the backward comes after all updates and copies: in those streams, and in the caller's.
"""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ebbtide.lms.streaming.step_copies import Staging, streams_of
from ebbtide.locks import locked, make_lock

_MOST_BEHIND = 2  # updates; the memory of their gradients is not used again yet


class BackwardUpdates:
    """On a device whose work is done at once they only share their slots."""

    def __init__(self) -> None:
        self._lock = make_lock()  # several optimizers may update, in threads of several devices
        self._staging = Staging()
        self._followed: dict[Any, set[Any]] = {}  # by device: the streams that made gradients
        self._behind: deque[tuple[list[tuple[Any, Any]], list[Any]]] = deque()  # who waits for what, and gradients

    @locked
    def run(self, gradients: list[tuple[Any, Any]], update: Callable[[Staging], None]) -> None:
        """Queues it. gradients: each with the stream that made it, or None."""
        import torch

        sources = _by_device(gradients)
        ours = {device: self._begin(device, streams) for device, streams in sources.items()}
        self._staging.forget_shortage()
        with ExitStack() as entered:
            for stream in ours.values():
                entered.enter_context(torch.cuda.stream(stream))
            update(self._staging)
        if ours:
            self._hold(sources, ours, gradients)

    @locked
    def close(self) -> None:
        """What is queued from now on comes after all updates. It can be called again, and by Python's collector."""
        import torch

        self._staging.join()
        for device, streams in self._followed.items():
            for stream in {*streams, torch.cuda.current_stream(device)}:
                stream.wait_stream(streams_of(device)[2])
        self._followed, self._staging = {}, Staging()
        self._behind.clear()

    def _begin(self, device: Any, sources: set[Any]) -> Any:
        """The stream for updates."""
        ours = streams_of(device)[2]
        for source in sources:
            ours.wait_stream(source)
            self._staging.follow(device, source)
            self._staging.homes[device] = source
        self._followed.setdefault(device, set()).update(sources)
        return ours

    def _hold(self, sources: dict[Any, set[Any]], ours: dict[Any, Any], gradients: list[tuple[Any, Any]]) -> None:
        import torch

        waits = []
        for device, streams in sources.items():
            end = torch.cuda.Event()
            end.record(ours[device])
            waits += [(stream, end) for stream in streams]
        self._behind.append((waits, [gradient for gradient, _ in gradients]))
        if len(self._behind) > _MOST_BEHIND:
            waits, _ = self._behind.popleft()
            for stream, end in waits:
                stream.wait_event(end)


def _by_device(gradients: list[tuple[Any, Any]]) -> dict[Any, set[Any]]:
    found: dict[Any, set[Any]] = {}
    for gradient, stream in gradients:
        if stream is not None:
            found.setdefault(gradient.device, set()).add(stream)
    return found
