"""Pause and resume of a language model's weights: Llama-8B's shapes in bf16 (290 tensors, 15 GiB), with a backup.

Checked in each cycle: free device memory, every tensor's checksum (computed on the device before and after), every
address. Over the cycles: no growth of device or host memory. The exit status is 1 where a check fails.

    python benchmarks/llama_cycle.py --out benchmarks/results
"""

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import Any

import provenance
import torch
from ebbtide import _core, saver
from ebbtide.sizes import format_size

LAYERS, HIDDEN, FEED, KEY_VALUE, VOCABULARY = 32, 4096, 14336, 1024, 128256
TAG = "weights"
# More than a page table's worth, less than one tensor: growth below this in 20 cycles is no leak of ours.
GROWTH_ALLOWED_BYTES = 32 << 20
CHECK_PIECE = 1 << 24


def parse_arguments() -> argparse.Namespace:
    is_gpu = saver.device == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0 if is_gpu else 0.01, help="of the matrices' rows")
    parser.add_argument("--cycles", type=int, default=20, help="after the first one")
    provenance.add_arguments(parser)
    arguments = parser.parse_args()
    if not 0 < arguments.scale <= 1 or arguments.cycles < 2:
        parser.error("--scale is above 0 and at most 1, --cycles at least 2")
    return arguments


def shapes(scale: float) -> list[tuple[int, ...]]:
    """Llama-3-8B's tensors, but for the last norm: 290. Each holds a multiple of 8 bytes in bf16."""
    block = [(HIDDEN, HIDDEN), (KEY_VALUE, HIDDEN), (KEY_VALUE, HIDDEN), (HIDDEN, HIDDEN)]
    block += [(FEED, HIDDEN), (FEED, HIDDEN), (HIDDEN, FEED)]
    matrices = [(VOCABULARY, HIDDEN), *(block * LAYERS), (VOCABULARY, HIDDEN)]
    norms = [(HIDDEN,)] * (2 * LAYERS)
    return [(max(1, int(rows * scale)), columns) for rows, columns in matrices] + norms


def make_tensors(scale: float) -> list[torch.Tensor]:
    with saver.region(TAG):
        tensors = [torch.empty(shape, dtype=torch.bfloat16, device=saver.device) for shape in shapes(scale)]
    torch.manual_seed(0)
    for tensor in tensors:
        tensor.flatten().view(torch.int64).random_()
    return tensors


def checksum(tensor: torch.Tensor, weights: torch.Tensor) -> tuple[int, int]:
    """Two sums modulo 2**64, the second one aware of each word's position."""
    plain = weighted = 0
    for number, piece in enumerate(tensor.flatten().view(torch.int64).split(CHECK_PIECE)):
        plain += int(piece.sum())
        weighted += (2 * number + 1) * int((piece * weights[: len(piece)]).sum())
    return plain % 2**64, weighted % 2**64


def synchronize() -> None:
    if saver.device == "cuda":
        torch.cuda.synchronize()


def memory() -> dict[str, int]:
    """Bytes: free on the device, this process's resident set, and what ebbtide says that it holds on the host."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "device_free": _core.query_device(0).free_bytes,
        "resident_set": resident_pages * resource.getpagesize(),
        "host_held": saver.stats()["host_held_bytes"],
    }


def cycle(tensors: list[torch.Tensor], expected: list[Any], weights: torch.Tensor) -> dict[str, Any]:
    """One pause and resume, with what was wrong about it."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    synchronize()
    before = memory()
    start = time.perf_counter()
    pause = saver.pause(TAG)
    pause_seconds = time.perf_counter() - start
    away = memory()
    start = time.perf_counter()
    resume = saver.resume(TAG)
    synchronize()
    resume_seconds = time.perf_counter() - start
    after = memory()
    faults = []
    if [tensor.data_ptr() for tensor in tensors] != addresses:
        faults.append("an address changed")
    if [checksum(tensor, weights) for tensor in tensors] != expected:
        faults.append("a tensor's bytes changed")
    # The first pause pins the ring, for which the driver takes a few MiB of the device.
    if away["device_free"] - before["device_free"] < pause.bytes - GROWTH_ALLOWED_BYTES:
        faults.append("pause freed less than it says")
    if not (pause.bytes == resume.bytes == pause.copied == resume.copied):
        faults.append(f"reports disagree: {pause} / {resume}")
    return {
        "bytes": pause.bytes,
        "pause_seconds": pause_seconds,
        "resume_seconds": resume_seconds,
        "memory": {"before": before, "paused": away, "after": after},
        "faults": faults,
    }


def find_growth(cycles: list[dict[str, Any]]) -> list[str]:
    """From the second cycle on: the first one makes the staging ring."""
    first, last = cycles[1]["memory"]["after"], cycles[-1]["memory"]["after"]
    grown = {
        "device memory": first["device_free"] - last["device_free"],
        "resident set": last["resident_set"] - first["resident_set"],
        "ebbtide's host memory": last["host_held"] - first["host_held"],
    }
    return [f"{name} grew by {format_size(size)}" for name, size in grown.items() if size > GROWTH_ALLOWED_BYTES]


def measure_link(size_bytes: int = 1 << 30) -> dict[str, float] | None:
    """The limit: bytes a second of one pinned copy each way. None on the simulated device."""
    if saver.device != "cuda":
        return None
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    rates = {}
    for name, to, source in (("to_host", host, device), ("to_device", device, host)):
        best = float("inf")
        for _ in range(4):
            synchronize()
            start = time.perf_counter()
            to.copy_(source, non_blocking=True)
            synchronize()
            best = min(best, time.perf_counter() - start)
        rates[name] = size_bytes / best
    return rates


def show_cycle(name: str, entry: dict[str, Any]) -> None:
    free = entry["memory"]
    rates = (entry["bytes"] / entry[f"{kind}_seconds"] / 1e9 for kind in ("pause", "resume"))
    print(
        f"{name}: pause {entry['pause_seconds']:.3f} s ({next(rates):.2f} GB/s), "
        f"resume {entry['resume_seconds']:.3f} s ({next(rates):.2f} GB/s); free on the device "
        f"{format_size(free['before']['device_free'])}, {format_size(free['paused']['device_free'])}, "
        f"{format_size(free['after']['device_free'])}; resident set {format_size(free['after']['resident_set'])}",
        flush=True,
    )


def main() -> int:
    arguments = parse_arguments()
    link = measure_link()
    tensors = make_tensors(arguments.scale)
    weights = torch.arange(1, 2 * CHECK_PIECE, 2, device=saver.device)  # odd: every bit of a word counts
    expected = [checksum(tensor, weights) for tensor in tensors]
    size = sum(tensor.nbytes for tensor in tensors)
    print(f"{len(tensors)} tensors, {format_size(size)} on the {saver.device} device")
    cycles = []
    for number in range(arguments.cycles + 1):
        cycles.append(cycle(tensors, expected, weights))
        show_cycle("first cycle" if number == 0 else f"cycle {number}", cycles[-1])
    faults = [f"cycle {n}: {fault}" for n, entry in enumerate(cycles) for fault in entry["faults"]]
    faults += find_growth(cycles)
    summary = {
        name: provenance.summarize([entry[f"{name}_seconds"] for entry in cycles[1:]]) for name in ("pause", "resume")
    }
    for name, times in summary.items():
        print(f"{name}, after the first cycle: {provenance.describe(times, 's')}")
    if link:
        print(
            ", ".join(f"one pinned copy {name.replace('_', ' ')}: {rate / 1e9:.1f} GB/s" for name, rate in link.items())
        )
    print("FAILED: " + "; ".join(faults) if faults else "every byte, every address, no growth: as it should be")
    result = {"tensors": len(tensors), "bytes": size, "link_bytes_per_second": link, "faults": faults}
    provenance.finish(arguments, {**result, "seconds": summary, "cycles": cycles})
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
