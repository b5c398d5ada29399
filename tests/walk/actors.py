"""Threads that run functions one at a time. The walk needs them because a region belongs to the thread that enters
it."""

import queue
import threading
from collections.abc import Callable
from typing import Any


class Worker:
    """A thread. `run` waits until the function has ended."""

    def __init__(self, number: int) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"walk-{number}", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            try:
                result = (True, task())
            except BaseException as error:
                result = (False, error)
            del task
            self._results.put(result)
            del result  # a waiting thread must keep nothing alive

    def run(self, task: Callable[[], Any]) -> Any:
        self._tasks.put(task)
        del task
        is_well, result = self._results.get()
        try:
            if not is_well:
                raise result
            return result
        finally:
            del result  # an error that a frame of its own traceback refers to lives until the next collection

    def stop(self) -> None:
        self._tasks.put(None)
        self._thread.join()


class Actors:
    """The main thread (0) and its workers (from 1 on)."""

    def __init__(self, count: int) -> None:
        self._workers = [Worker(number) for number in range(1, count)]
        self.count = count

    def run(self, actor: int, task: Callable[[], Any]) -> Any:
        return task() if actor == 0 else self._workers[actor - 1].run(task)

    def stop(self) -> None:
        for worker in self._workers:
            worker.stop()
