"""Pause and resume of a language model's weights: Llama-8B's shapes in bf16 (290 tensors, 15 GiB), with a backup.

Checked in each cycle: free device memory, every tensor's checksum (computed on the device before and after), every
address. Over the cycles: no growth of device or host memory. The exit status is 1 where a check fails.

    python -m benchmarks.llama_cycle --out benchmarks/results
"""

import argparse
import sys
import time
from typing import Any

import torch
from ebbtide import saver
from ebbtide.sizes import format_size

from benchmarks import device, provenance
from benchmarks import tensors as kept

TAG = "weights"
# More than a page table's worth, less than one tensor: growth below this in 20 cycles is no leak of ours.
GROWTH_ALLOWED_BYTES = 32 << 20


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


def make_tensors(scale: float) -> list[torch.Tensor]:
    with saver.region(TAG):
        tensors = kept.make(kept.llama_shapes(scale))
    kept.fill(tensors)
    return tensors


def memory() -> dict[str, int]:
    """Bytes: free on the device, this process's resident set, and what ebbtide says that it holds on the host."""
    return {
        "device_free": device.free_bytes(),
        "resident_set": device.resident_bytes(),
        "host_held": saver.stats()["host_held_bytes"],
    }


def cycle(tensors: list[torch.Tensor], expected: list[kept.Sums], checker: kept.Checker) -> dict[str, Any]:
    """One pause and resume, with what was wrong about it."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    device.synchronize()
    before = memory()
    start = time.perf_counter()
    pause = saver.pause(TAG)
    pause_seconds = time.perf_counter() - start
    away = memory()
    start = time.perf_counter()
    resume = saver.resume(TAG)
    device.synchronize()
    resume_seconds = time.perf_counter() - start
    after = memory()
    faults = []
    if [tensor.data_ptr() for tensor in tensors] != addresses:
        faults.append("an address changed")
    if checker.sums(tensors) != expected:
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
    array = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    rates = {}
    for name, to, source in (("to_host", host, array), ("to_device", array, host)):
        best = float("inf")
        for _ in range(4):
            device.synchronize()
            start = time.perf_counter()
            to.copy_(source, non_blocking=True)
            device.synchronize()
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
    checker = kept.Checker()
    expected = checker.sums(tensors)
    size = sum(tensor.nbytes for tensor in tensors)
    print(f"{len(tensors)} tensors, {format_size(size)} on the {saver.device} device")
    cycles = []
    for number in range(arguments.cycles + 1):
        cycles.append(cycle(tensors, expected, checker))
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
