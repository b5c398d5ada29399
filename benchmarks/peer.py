"""A second process with the saver: the parts on sharing and hand-overs have one beside their own."""

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch import multiprocessing

from benchmarks.isolation import describe_error
from benchmarks.unmodified import die_with_parent

ANSWER_SECONDS = 120
STOP_SECONDS = 30


def environment() -> dict[str, str]:
    """Of a part that has a peer. On the simulated device both see one, which no other run sees."""
    return {"EBBTIDE_SHARED": "1", "EBBTIDE_SIM_SHARED": f"benchmark-{os.getpid()}"}


class Peer:
    """It runs functions, by name, one after the other. What they keep is in their own module.

    Attributes:
        pid: its own.
        queue: one of torch.multiprocessing, in which it finds tensors as `queue_to_peer()`.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, its = context.Pipe()
        self.queue = context.Queue()
        self._process: BaseProcess = context.Process(target=_serve, args=(its, self.queue), daemon=True)
        self._process.start()
        self.pid = int(self.answer())

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._pipe.send((function, arguments))

    def answer(self) -> Any:
        """What the function gave.

        Raises:
            RuntimeError: it failed, or took too long.
        """
        if not self._pipe.poll(ANSWER_SECONDS):
            raise RuntimeError(f"the other process has not answered for {ANSWER_SECONDS} s")
        is_error, found = self._pipe.recv()
        if is_error:
            raise RuntimeError(f"in the other process: {found}")
        return found

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.start(function, *arguments)
        return self.answer()

    def stop(self) -> None:
        self._pipe.close()
        self._process.join(STOP_SECONDS)
        Path(f"/dev/shm/ebbtide-sim-{os.geteuid()}-{os.environ['EBBTIDE_SIM_SHARED']}").unlink(missing_ok=True)


_queues: list[Any] = []


def queue_to_peer() -> Any:
    """In the peer."""
    return _queues[0]


def _serve(pipe: Connection, queue: Any) -> None:
    die_with_parent()
    _queues.append(queue)
    pipe.send((False, os.getpid()))
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, function(*arguments)))
        except Exception as error:
            pipe.send((True, describe_error(error)))
