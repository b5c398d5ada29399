"""ebbtide's costs beside the time of a pause: importing it, host memory, device memory for itself.

Processor time is measured with every pause and resume of the other workloads (`cpu_seconds`).
"""

import subprocess
import sys

import torch
from ebbtide import _core, saver

from benchmarks import device
from benchmarks import tensors as kept
from benchmarks.cycles import Cycle
from benchmarks.keepers import Ebbtide
from benchmarks.measured import Measured, Part
from benchmarks.sizes import Sizes

# Growth below this over all cycles but the first is no leak of ours: a tensor is larger, a page table smaller.
GROWTH_ALLOWED_BYTES = 16 << 20
IMPORT = """
import sys, time
start = time.perf_counter()
import ebbtide
seconds = time.perf_counter() - start
assert "torch" not in sys.modules
print(seconds)
"""


def measure_import(sizes: Sizes) -> Measured:
    """`import ebbtide` in Pythons that have not imported torch."""
    measured = Measured()
    for turn in range(2 * sizes.samples + 1):
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        if turn:  # the first one reads the files from disk
            measured.add("import", float(done.stdout))
    return measured


def device_bytes_of_our_own() -> int:
    """Device memory that a first pause and resume leave taken, apart from the tag's own."""
    assert not torch.zeros(1024, device=saver.device).any()  # so that torch's own share is taken before
    device.synchronize()
    free_before, held_before = device.free_bytes(), _core.query_device(0).held_bytes
    with saver.region("tiny"):
        tensor = torch.zeros(1024, device=saver.device)
    saver.pause("tiny")
    saver.resume("tiny")
    assert not tensor.any()
    taken = free_before - device.free_bytes()
    return taken - (_core.query_device(0).held_bytes - held_before)


def memory() -> dict[str, int]:
    """Bytes in use: on the device, by this process on the host, and by ebbtide's own count."""
    return {
        "device memory": -device.free_bytes(),
        "resident host memory": device.resident_bytes(),
        "ebbtide's host memory": saver.stats()["host_held_bytes"],
    }


def find_growth(before: dict[str, int], after: dict[str, int]) -> list[str]:
    grown = {name: after[name] - size_bytes for name, size_bytes in before.items()}
    return [
        f"{name} grew by {size_bytes} bytes" for name, size_bytes in grown.items() if size_bytes > GROWTH_ALLOWED_BYTES
    ]


def measure_memory(sizes: Sizes) -> Measured:
    """Facts are bytes; resident ones are those of the whole process, by which it grew since the tensors were there."""
    measured = Measured()
    own_bytes = device_bytes_of_our_own()
    cycle = Cycle(Ebbtide(backup="ram"), kept.llama_shapes(sizes.scale))
    before = device.resident_bytes()
    cycle.run(measured)
    after_first = memory()
    for _ in range(sizes.samples):
        cycle.run(measured)
    after_all = memory()
    measured.faults += find_growth(after_first, after_all)
    measured.facts |= {
        "device_bytes_of_our_own": own_bytes,
        "resident_growth_first_bytes": after_first["resident host memory"] - before,
        "resident_growth_later_bytes": after_all["resident host memory"] - after_first["resident host memory"],
        "host_held_bytes": after_all["ebbtide's host memory"],
    }
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [Part("hidden_costs.import", measure_import), Part("hidden_costs.memory", measure_memory)]
