"""Allocation in a region against torch's default allocator, on the tensors of a transformer's training step.

A step allocates the tensors that the forward pass of each block leaves for backward, and frees them in reverse, as
backward does. Shapes are Llama-8B's (hidden 4096, feed-forward 14336, 8 key-value heads of 128) times the tokens, in
bf16; nothing is computed. Both allocators run in one process, by turns. Metrics are seconds for one allocation and its
free:

- warm: from torch's cache, as every step but the first
- cold: with the cache empty, so that each segment comes from the driver (cudaMalloc, or ebbtide's mapping)
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from ebbtide import saver

from benchmarks import device
from benchmarks.measured import Measured, Part
from benchmarks.sizes import Sizes
from benchmarks.tensors import FEED, HIDDEN, KEY_VALUE

# The saved tensors of one block: two norms, q, k, v, attention's output, gate, up, their product, two residuals.
BLOCK_WIDTHS = (HIDDEN, HIDDEN, HIDDEN, KEY_VALUE, KEY_VALUE, HIDDEN, FEED, FEED, FEED, HIDDEN, HIDDEN)
ENTERINGS = 200


def step(sizes: Sizes) -> int:
    """One training step's allocations; gives how many."""
    held = []
    for _ in range(sizes.activation_blocks):
        for width in BLOCK_WIDTHS:
            held.append(torch.empty(sizes.activation_tokens, width, dtype=torch.bfloat16, device=saver.device))
    count = len(held)
    while held:
        held.pop()
    return count


def seconds_per_allocation(sizes: Sizes, scope: AbstractContextManager[object]) -> float:
    with scope:
        start = time.perf_counter()
        count = step(sizes)
        return (time.perf_counter() - start) / count


def measure_warm(sizes: Sizes, measured: Measured) -> None:
    scopes: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "default": nullcontext,
        "region": lambda: saver.region("warm", backup=None),
    }
    for turn in range(sizes.malloc_steps + 3):
        for name, scope in scopes.items():
            seconds = seconds_per_allocation(sizes, scope())
            if turn >= 3:  # the first steps fill the caches
                measured.add(f"warm_{name}", seconds)
    saver.pause("warm")


def measure_cold(sizes: Sizes, measured: Measured) -> None:
    for turn in range(sizes.cold_steps):
        device.empty_cache()
        measured.add("cold_default", seconds_per_allocation(sizes, nullcontext()))
        tag = f"cold-{turn}"  # a tag's first pool has no cache
        measured.add("cold_region", seconds_per_allocation(sizes, saver.region(tag, backup=None)))
        saver.pause(tag)


def measure_entering(measured: Measured) -> None:
    """Entering and leaving a region that was entered before."""
    region = saver.region("warm-enter")
    for _ in range(ENTERINGS):
        start = time.perf_counter()
        with region:
            pass
        measured.add("enter_and_leave", time.perf_counter() - start)


def measure(sizes: Sizes) -> Measured:
    measured = Measured(facts={"allocations_per_step": sizes.activation_blocks * len(BLOCK_WIDTHS)})
    measure_warm(sizes, measured)
    measure_cold(sizes, measured)
    measure_entering(measured)
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [Part("malloc.ebbtide", measure)]
