"""The driver's calls for virtual memory, by ctypes: the bound for ebbtide and the baselines.

Each call costs about a microsecond of Python on top of the driver's own time. On the simulated device the same calls
go to the stand-in.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from types import SimpleNamespace
from typing import Any

import torch
from ebbtide import saver

from benchmarks import device

GRANULARITY_BYTES = 2 << 20
PINNED_ALLOCATION, DEVICE_LOCATION, READ_WRITE, FILE_DESCRIPTOR = 1, 1, 3, 1
RDMA_CAPABLE_ATTRIBUTE, RDMA_FLAG = 110, 1  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED; its place


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", Location),
        ("win32_handle_metadata", c_void_p),
        ("flags", c_ubyte * 8),
    ]


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", c_int)]


class DriverCallError(Exception):
    """A driver call that did not succeed."""


def round_up(size_bytes: int) -> int:
    """To whole pages of the driver."""
    return -(-size_bytes // GRANULARITY_BYTES) * GRANULARITY_BYTES


class Driver:
    """The driver of the device under test, with its primary context current in the calling thread.

    Args:
        is_exportable: the memory that it makes can be.
    """

    def __init__(self, is_exportable: bool = False) -> None:
        self._library = ctypes.CDLL(device.driver_library())
        location = Location(DEVICE_LOCATION, 0)
        handle_types = FILE_DESCRIPTOR if is_exportable else 0
        self._properties = AllocationProperties(PINNED_ALLOCATION, handle_types, location)
        self._access = AccessDescription(location, READ_WRITE)
        context, is_rdma_capable = c_void_p(), c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGetAttribute", byref(is_rdma_capable), RDMA_CAPABLE_ATTRIBUTE, 0)
        self._properties.flags[RDMA_FLAG] = is_rdma_capable.value  # as memory that other processes may import
        self.call("cuDevicePrimaryCtxRetain", byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises DriverCallError unless it answers CUDA_SUCCESS."""
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise DriverCallError(f"{name} answered {code}")

    def reserve(self, size_bytes: int) -> int:
        address = c_uint64()
        self.call("cuMemAddressReserve", byref(address), c_size_t(size_bytes), c_size_t(0), c_uint64(0), c_uint64(0))
        return address.value

    def free_range(self, address: int, size_bytes: int) -> None:
        self.call("cuMemAddressFree", c_uint64(address), c_size_t(size_bytes))

    def create(self, size_bytes: int) -> c_uint64:
        handle = c_uint64()
        self.call("cuMemCreate", byref(handle), c_size_t(size_bytes), byref(self._properties), c_uint64(0))
        return handle

    def map(self, address: int, size_bytes: int, handle: c_uint64) -> None:
        self.call("cuMemMap", c_uint64(address), c_size_t(size_bytes), c_size_t(0), handle, c_uint64(0))

    def set_access(self, address: int, size_bytes: int) -> None:
        self.call("cuMemSetAccess", c_uint64(address), c_size_t(size_bytes), byref(self._access), c_size_t(1))

    def unmap(self, address: int, size_bytes: int) -> None:
        self.call("cuMemUnmap", c_uint64(address), c_size_t(size_bytes))

    def release(self, handle: c_uint64) -> None:
        self.call("cuMemRelease", handle)

    def export(self, handle: c_uint64) -> int:
        """A descriptor, which the caller closes."""
        file = c_int()
        self.call("cuMemExportToShareableHandle", byref(file), handle, FILE_DESCRIPTOR, c_uint64(0))
        return file.value

    def import_from(self, file: int) -> c_uint64:
        handle = c_uint64()
        self.call("cuMemImportFromShareableHandle", byref(handle), c_void_p(file), FILE_DESCRIPTOR)
        return handle

    def touch(self, address: int, size_bytes: int) -> None:
        """Writes to all of it. Returns when that is done."""
        self.call("cuMemsetD8Async", c_uint64(address), ctypes.c_ubyte(1), c_size_t(size_bytes), c_void_p())
        self.call("cuCtxSynchronize")

    def copy_to_host(self, host: int, address: int, size_bytes: int) -> None:
        """Returns when the bytes are there."""
        self.call("cuMemcpyDtoH_v2", c_void_p(host), c_uint64(address), c_size_t(size_bytes))

    def copy_to_device(self, address: int, host: int, size_bytes: int) -> None:
        """Returns when the bytes are there, or on their way in the legacy stream."""
        self.call("cuMemcpyHtoD_v2", c_uint64(address), c_void_p(host), c_size_t(size_bytes))


def bytes_at(address: int, size_bytes: int) -> torch.Tensor:
    """A tensor of bytes over mapped memory of the device under test; the memory is the caller's."""
    if device.is_gpu():
        array = {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 2}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=array), device=saver.device)
    return torch.frombuffer((c_ubyte * size_bytes).from_address(address), dtype=torch.uint8)


def segments_of(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """How torch's pools would cut the tensors: 2 MiB for small ones, 20 MiB up to 10 MiB, else the size in whole pages.

    Returns:
        The segments' bytes, and for each tensor its segment's index and its offset there.
    """
    segments: list[int] = []
    places: list[tuple[int, int]] = []
    open_segments: dict[int, tuple[int, int]] = {}  # segment bytes -> index, bytes used
    for size in sizes:
        shared = (2 << 20) if size <= 1 << 20 else (20 << 20) if size < 10 << 20 else None
        if shared is None:
            places.append((len(segments), 0))
            segments.append(round_up(size))
            continue
        index, used = open_segments.get(shared, (-1, shared))
        if used + size > shared:
            index, used = len(segments), 0
            segments.append(shared)
        places.append((index, used))
        open_segments[shared] = (index, used + -(-size // 512) * 512)
    return segments, places
