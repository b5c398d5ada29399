"""The common part of the programs: arguments, answers, and waiting for the device."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"


def arguments() -> SimpleNamespace:
    return SimpleNamespace(**json.loads(sys.argv[1]))


def answer(**figures: Any) -> None:
    print(json.dumps(figures), flush=True)


def serve(turns: Mapping[str, Callable[[], float]]) -> None:
    """Says that it is ready; then does each turn that a line of standard input names, and answers its seconds."""
    answer(ready=True)
    for line in sys.stdin:
        answer(seconds=turns[line.strip()]())


def synchronize() -> None:
    if IS_GPU:
        torch.cuda.synchronize()


def free_bytes() -> int:
    """Of the device, by the driver; 0 where there is none."""
    return int(torch.cuda.mem_get_info()[0]) if IS_GPU else 0


def time_each(turns: Iterable[int], work: Callable[[], object]) -> list[float]:
    """Seconds of each turn, until the device has nothing left to do."""
    seconds = []
    for _ in turns:
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds
