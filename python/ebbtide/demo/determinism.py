"""The same numbers in every run on the same machine, so that runs can be compared to the last bit."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic() -> Iterator[None]:
    """Enter it before the first matrix product of the process: cuBLAS reads its setting once.

    One CPU thread: products this small gain nothing from more, and lose much where other programs use the cores.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(before)
