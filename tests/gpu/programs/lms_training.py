"""Shared by the programs of test_gpu_lms.py: a model whose activations, states and weights can be told apart in size,
and a training of it whose losses are equal bit for bit from run to run."""

import threading
import time
from types import TracebackType

import torch
from ebbtide import lms

torch.use_deterministic_algorithms(True, warn_only=True)

MIB = 1 << 20
SMALL = "64KiB"


def make_model(depth: int, width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    blocks = ((torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.LayerNorm(width)) for _ in range(depth))
    return torch.nn.Sequential(*(part for block in blocks for part in block)).cuda()


def train(steps: int = 4, depth: int = 12, width: int = 1024, batch: int = 16384) -> list[float]:
    """The losses."""
    model = make_model(depth, width)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(batch, width, device="cuda")).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def measured(**shape: int) -> tuple[list[float], int]:
    """The losses of a training without LMS, and the most bytes that torch held for it, caches included."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses = train(**shape)
    held = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    return losses, held


class Held:
    """The most device memory that was held, in bytes, as a thread saw it that looked all the time."""

    def __enter__(self) -> "Held":
        self.most_bytes, self._is_over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._is_over.is_set():
            self._look()
            time.sleep(0.001)

    def _look(self) -> None:
        self.most_bytes = max(self.most_bytes, lms.stats()["device_bytes"])

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()


class HeldByDriver(Held):
    """The same as the driver counts it, without what it held for others, and for kernels and contexts, at the start."""

    def __enter__(self) -> "HeldByDriver":
        self._others = self._used() - torch.cuda.memory_reserved()
        super().__enter__()
        return self

    @staticmethod
    def _used() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    def _look(self) -> None:
        self.most_bytes = max(self.most_bytes, self._used() - self._others)


def trains_within(share: float, **shape: int) -> dict[str, int | float]:
    """Trains without LMS, and within that part of the memory, with the same losses. Returns LMS's numbers."""
    plain, needed = measured(**shape)
    limit = int(share * needed)
    with lms.enable(limit=limit, min_size=SMALL):
        with Held() as held:
            losses = train(**shape)
        numbers = lms.stats()
    assert losses == plain, (losses, plain)
    assert held.most_bytes <= limit, f"{held.most_bytes >> 20} MiB were held, {limit >> 20} allowed"
    assert numbers["host_bytes"] == 0, numbers
    return numbers
