"""Allocation in a region against torch's default allocator, on the tensors of a transformer's training step.

A step allocates what the forward pass of each block leaves for backward, and frees it in reverse, as backward does.
Shapes are Llama-8B's (hidden 4096, feed-forward 14336, 8 key-value heads of 128) times --tokens, in bf16; nothing is
computed. Both allocators run in one process, by turns.

- warm: from torch's cache, as every step but the first: what a program pays
- cold: with the cache empty, so that each segment comes from the driver (cudaMalloc, or ebbtide's mapping)

    python benchmarks/malloc_region.py --out benchmarks/results
"""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import provenance
import torch
from ebbtide import saver

HIDDEN, FEED, KEY_VALUE = 4096, 14336, 1024
# What one block saves for backward: two norms, q, k, v, attention's output, gate, up, their product, two residuals.
BLOCK_WIDTHS = (HIDDEN, HIDDEN, HIDDEN, KEY_VALUE, KEY_VALUE, HIDDEN, FEED, FEED, FEED, HIDDEN, HIDDEN)


def parse_arguments() -> argparse.Namespace:
    is_gpu = saver.device == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096 if is_gpu else 256, help="rows of each activation")
    parser.add_argument("--blocks", type=int, default=32 if is_gpu else 8, help="blocks of the transformer")
    parser.add_argument("--warm", type=int, default=200, help="warm steps of each allocator")
    parser.add_argument("--cold", type=int, default=10, help="cold steps of each allocator")
    provenance.add_arguments(parser)
    return parser.parse_args()


def step(arguments: argparse.Namespace) -> int:
    """One training step's allocations; gives how many."""
    held = []
    for _ in range(arguments.blocks):
        for width in BLOCK_WIDTHS:
            held.append(torch.empty(arguments.tokens, width, dtype=torch.bfloat16, device=saver.device))
    count = len(held)
    while held:
        held.pop()
    return count


def seconds_per_allocation(arguments: argparse.Namespace, scope: AbstractContextManager[object]) -> float:
    with scope:
        start = time.perf_counter()
        count = step(arguments)
        return (time.perf_counter() - start) / count


def measure_warm(arguments: argparse.Namespace) -> dict[str, list[float]]:
    scopes: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "default": nullcontext,
        "region": lambda: saver.region("warm", backup=None),
    }
    times: dict[str, list[float]] = {name: [] for name in scopes}
    for turn in range(arguments.warm + 3):
        for name, scope in scopes.items():
            seconds = seconds_per_allocation(arguments, scope())
            if turn >= 3:  # the first steps fill the caches
                times[name].append(seconds)
    saver.pause("warm")
    return times


def measure_cold(arguments: argparse.Namespace) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"default": [], "region": []}
    for turn in range(arguments.cold):
        if saver.device == "cuda":
            torch.cuda.empty_cache()
        times["default"].append(seconds_per_allocation(arguments, nullcontext()))
        tag = f"cold-{turn}"  # a tag's first pool has no cache
        times["region"].append(seconds_per_allocation(arguments, saver.region(tag, backup=None)))
        saver.pause(tag)
    return times


def measure_entering(count: int = 200) -> list[float]:
    """Entering and leaving a region that was entered before."""
    times = []
    region = saver.region("warm-enter")
    for _ in range(count):
        start = time.perf_counter()
        with region:
            pass
        times.append(time.perf_counter() - start)
    return times


def main() -> int:
    arguments = parse_arguments()
    result: dict[str, object] = {"allocations_per_step": arguments.blocks * len(BLOCK_WIDTHS)}
    for kind, measure in (("warm", measure_warm), ("cold", measure_cold)):
        summaries = {name: provenance.summarize(times) for name, times in measure(arguments).items()}
        ratio = summaries["region"]["median"] / summaries["default"]["median"]
        result[kind] = {"seconds_per_allocation": summaries, "ratio": ratio}
        for name, summary in summaries.items():
            print(f"{kind}, {name}: {provenance.describe(summary, 'us an allocation', 1e6)}")
        print(f"{kind}: region / default = {ratio:.3f}")
    entering = provenance.summarize(measure_entering())
    result["seconds_to_enter_and_leave"] = entering
    print(f"entering and leaving a region: {provenance.describe(entering, 'us', 1e6)}")
    provenance.finish(arguments, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
