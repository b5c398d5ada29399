"""Pauses and resumes some 64 MiB without torch, so that compute-sanitizer watches ebbtide's kernels and nothing else.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/kernels_under_sanitizer.py

With EBBTIDE_DRIVER=sim it runs without a GPU. Prints "content is right" and ends with status 0 on success.
"""

import ctypes
import os
import random
from pathlib import Path

from ebbtide import _core

MIB = 1 << 20
BLOCK = 2 * MIB
RAM = 1
# One block, several blocks, and sizes that are no multiple of a block, which are rounded up.
SIZES = (1, BLOCK, BLOCK + 1, 5 * MIB + 12345, 10 * MIB, 17 * MIB - 7, 25 * MIB)


class Device:
    """Copies through the driver that the core has chosen."""

    def __init__(self) -> None:
        is_simulated = _core.driver_name() == "sim"
        simulator = str(Path(_core.loaded_library()).with_name("libebbtide_sim.so"))
        self.handle = ctypes.CDLL(simulator if is_simulated else "libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self.handle, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def write(self, address: int, data: bytearray) -> None:
        source = (ctypes.c_char * len(data)).from_buffer(data)
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), source, ctypes.c_size_t(len(data)))

    def read(self, address: int, size_bytes: int) -> bytes:
        target = ctypes.create_string_buffer(size_bytes)
        self.call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))
        return target.raw


def make_content(source: random.Random, size_bytes: int) -> bytearray:
    """Blocks of each kind in turn: noise, zeros, one value of 16 bytes, all equal but the last byte, NaNs."""
    data = bytearray()
    for index in range(0, size_bytes, BLOCK):
        kind = (index // BLOCK + size_bytes) % 5
        block = bytearray(source.randbytes(BLOCK)) if kind == 0 else bytearray(BLOCK)
        if kind in (2, 3):
            block = bytearray(source.randbytes(16) * (BLOCK // 16))
        if kind == 3:
            block[-1] ^= 1
        if kind == 4:
            block = bytearray(b"\x01\x00\xc0\x7f" * (BLOCK // 4))
        data += block
    return data[:size_bytes]


def change(source: random.Random, data: bytearray) -> None:
    """Changes one bit at the end and one elsewhere: some blocks stay clean, some do not, some are no longer
    constant."""
    data[-1] ^= 0x80
    data[source.randrange(len(data))] ^= 1 << source.randrange(8)


def check(device: Device, contents: dict[int, bytearray]) -> None:
    for address, data in contents.items():
        assert device.read(address, len(data)) == data, f"{len(data)} bytes at {address:#x} have changed"


def main() -> None:
    _core.use_driver("sim" if os.environ.get("EBBTIDE_DRIVER") == "sim" else "cuda")
    source = random.Random(4)
    contents = {_core.alloc("kernels", size, backup=RAM, retain=True): make_content(source, size) for size in SIZES}
    device = Device()
    for address, data in contents.items():
        device.write(address, data)
    totals = dict.fromkeys(("copied", "clean", "constant"), 0)
    for turn in range(3):
        if turn == 2:
            for address, data in contents.items():
                change(source, data)
                device.write(address, data)
        report = _core.pause(["kernels"])
        assert report.copied + report.clean + report.constant == report.bytes, report
        for name in totals:
            totals[name] += getattr(report, name)
        if turn == 1:
            _core.resume_async(["kernels"]).wait()
        else:
            _core.resume(["kernels"])
        check(device, contents)
    assert all(totals.values()), totals
    for address in contents:
        _core.free(address)
    print(f"content is right: {totals}")


if __name__ == "__main__":
    main()
