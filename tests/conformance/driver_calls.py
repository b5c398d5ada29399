"""The CUDA driver API through ctypes, over whichever library it is given: libcuda, libamdhip64 or the simulator.

Functions are found as ebbtide finds them: by cuGetProcAddress, at the version that csrc/driver/functions.def names, or
csrc/sim/program_functions.def. HIP's are found by dlsym, under the names in the first (hip_calls.py).
A call returns its CUresult as an int; the helpers of `Driver` in lower case assert success and return the new object.
"""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import hip_calls

CSRC = Path(__file__).resolve().parents[2] / "csrc"
FUNCTION_LISTS = (CSRC / "driver/functions.def", CSRC / "sim/program_functions.def")

GRANULE = 2 << 20  # allocation granularity, bytes

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 0, 1, 2, 3
NO_DEVICE, INVALID_DEVICE = 100, 101
INVALID_CONTEXT = 201
PEER_ACCESS_UNSUPPORTED = 217
INVALID_HANDLE, ILLEGAL_STATE, NOT_FOUND, NOT_READY = 400, 401, 500, 600
INVALID_PTX, UNSUPPORTED_PTX_VERSION = 218, 222
ILLEGAL_ADDRESS, CONTEXT_IS_DESTROYED = 700, 709
MISALIGNED_ADDRESS = 716
UNKNOWN = 999
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
NOT_PERMITTED, NOT_SUPPORTED = 800, 801
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURE_MERGE, CAPTURE_UNMATCHED, CAPTURE_UNJOINED = 900, 901, 902, 903, 904
CAPTURE_ISOLATION, CAPTURE_IMPLICIT, CAPTURED_EVENT, CAPTURE_WRONG_THREAD = 905, 906, 907, 908

DEVICE, HOST, HOST_NUMA, HOST_NUMA_CURRENT = 1, 2, 3, 4  # CUmemLocationType
PROT_NONE, PROT_READ, PROT_READWRITE = 0, 1, 3
CAPTURE_GLOBAL, CAPTURE_THREAD_LOCAL, CAPTURE_RELAXED = 0, 1, 2

# p: pointer (an int address, a ctypes object by reference, or None); d: 64-bit unsigned; z: size_t; i, I: int;
# H: short; b: byte
SIGNATURES = {
    "cuInit": "I", "cuDriverGetVersion": "p", "cuGetErrorName": "ip", "cuGetErrorString": "ip",
    "cuDeviceGetCount": "p", "cuDeviceGet": "pi", "cuDeviceGetName": "pii", "cuDeviceGetAttribute": "pii",
    "cuDeviceTotalMem": "pi", "cuDeviceGetUuid": "pi",
    "cuDevicePrimaryCtxRetain": "pi", "cuDevicePrimaryCtxRelease": "i", "cuDevicePrimaryCtxGetState": "ipp",
    "cuDeviceCanAccessPeer": "pii", "cuCtxEnablePeerAccess": "pI",
    "cuCtxGetCurrent": "p", "cuCtxSetCurrent": "p", "cuCtxGetDevice": "p", "cuCtxSynchronize": "",
    "cuMemGetInfo": "pp", "cuMemGetAllocationGranularity": "ppi",
    "cuMemAddressReserve": "pzzdd", "cuMemAddressFree": "dz", "cuMemCreate": "pzpd", "cuMemRelease": "d",
    "cuMemMap": "dzzdd", "cuMemUnmap": "dz", "cuMemSetAccess": "dzpz", "cuMemGetAccess": "ppd",
    "cuMemRetainAllocationHandle": "pp",
    "cuMemAlloc": "pz", "cuMemFree": "d", "cuMemHostAlloc": "pzI", "cuMemFreeHost": "p",
    "cuMemHostRegister": "pzI", "cuMemHostUnregister": "p", "cuPointerGetAttribute": "pid",
    "cuMemGetAddressRange": "ppd", "cuPointerGetAttributes": "Ippd", "cuIpcGetMemHandle": "pd",
    "cuMemAllocPitch": "ppzzI", "cuMemAllocManaged": "pzI", "cuDeviceGetDefaultMemPool": "pi",
    "cuMemAllocAsync": "pzp", "cuMemAllocFromPoolAsync": "pzpp", "cuMemFreeAsync": "dp",
    "cuMemcpyHtoD": "dpz", "cuMemcpyDtoH": "pdz", "cuMemcpyHtoDAsync": "dpzp", "cuMemcpyDtoHAsync": "pdzp",
    "cuMemcpyDtoDAsync": "ddzp", "cuMemsetD8Async": "dbzp",
    "cuStreamCreate": "pI", "cuStreamDestroy": "p", "cuStreamSynchronize": "p", "cuStreamQuery": "p",
    "cuStreamWaitEvent": "ppI", "cuStreamIsCapturing": "pp", "cuStreamBeginCapture": "pi", "cuStreamEndCapture": "pp",
    "cuGraphDestroy": "p", "cuThreadExchangeStreamCaptureMode": "p", "cuLaunchHostFunc": "ppp",
    "cuEventCreate": "pI", "cuEventDestroy": "p", "cuEventRecord": "pp", "cuEventQuery": "p",
    "cuEventSynchronize": "p", "cuEventElapsedTime": "ppp",
    "cuModuleLoadData": "pp", "cuModuleGetFunction": "ppp", "cuModuleUnload": "p", "cuLaunchKernel": "pIIIIIIIppp",
    "cuCtxDestroy": "p", "cuCtxPushCurrent": "p", "cuCtxPopCurrent": "p",
    "cuMemAllocHost": "pz", "cuMemHostGetDevicePointer": "ppI", "cuMemcpy": "ddz", "cuMemcpyAsync": "ddzp",
    "cuMemcpyDtoD": "ddz", "cuMemsetD8": "dbz", "cuMemsetD16": "dHz", "cuMemsetD32": "dIz",
    "cuMemsetD16Async": "dHzp", "cuMemsetD32Async": "dIzp", "cuModuleLoadDataEx": "ppIpp",
    "cuMemExportToShareableHandle": "pdid", "cuMemImportFromShareableHandle": "ppi",
    "cuMemGetAllocationPropertiesFromHandle": "pd",
    "cuStreamWaitValue32": "pdII", "cuStreamWriteValue32": "pdII",
}  # fmt: skip
CTYPES = {
    "p": ctypes.c_void_p,
    "d": ctypes.c_uint64,
    "z": ctypes.c_size_t,
    "i": ctypes.c_int,
    "I": ctypes.c_uint,
    "H": ctypes.c_ushort,
    "b": ctypes.c_ubyte,
}
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


def properties(location_type: int = DEVICE, location_id: int = 0, allocation_type: int = 1) -> AllocationProperties:
    return AllocationProperties(type=allocation_type, location=Location(location_type, location_id))


def least_versions() -> dict[str, int]:
    """Every function of the two lists and the version that it is asked for at."""
    text = "".join(file.read_text() for file in FUNCTION_LISTS)
    rows = re.findall(r"^EBBTIDE_FUNCTION\((\w+), (\d+), \w+[,)]", text, re.MULTILINE)
    return {name: int(version) for name, version in rows}


class Driver:
    """A loaded driver library; `driver.cuMemMap(...)` returns the CUresult."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.handle = ctypes.CDLL(path)
        self._versions = least_versions()
        self._resolved: dict[str, Callable[..., int]] = {}
        self.keep: list[object] = []  # objects that the driver still points to

    def address_of(self, name: str, version: int, flags: int = 0) -> tuple[int, int, int | None]:
        """cuGetProcAddress_v2's result, symbol status and address."""
        address, status = ctypes.c_void_p(), ctypes.c_int(-1)
        function = self.handle.cuGetProcAddress_v2
        code = function(name.encode(), ctypes.byref(address), version, ctypes.c_uint64(flags), ctypes.byref(status))
        return code, status.value, address.value

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in SIGNATURES:
            raise AttributeError(name)
        if name not in self._resolved:
            self._resolved[name] = self._resolve_hip(name) if hip_calls.SPEAKS_HIP else self._resolve_cuda(name)
        return self._resolved[name]

    def _resolve_cuda(self, name: str) -> Callable[..., int]:
        code, _, address = self.address_of(name, self._versions[name])
        assert code == SUCCESS, f"{name} is not to be had from {self.path}: {code}"
        assert address
        return _function(address, SIGNATURES[name])

    def _resolve_hip(self, name: str) -> Callable[..., int]:
        symbol = ctypes.cast(getattr(self.handle, hip_calls.hip_names()[name]), ctypes.c_void_p).value
        return hip_calls.adapt(name, _function(symbol or 0, {**SIGNATURES, **hip_calls.SIGNATURES}[name]))

    # --- helpers that must succeed ---

    def make(self, name: str, kind: type, *arguments: object) -> int:
        """Calls a function whose first argument is where the result goes."""
        result = kind()
        assert getattr(self, name)(result, *arguments) == SUCCESS, name
        return result.value or 0

    def reserve(self, size: int, alignment: int = 0, hint: int = 0) -> int:
        return self.make("cuMemAddressReserve", ctypes.c_uint64, size, alignment, hint, 0)

    def create(self, size: int = GRANULE, location_type: int = DEVICE, location_id: int = 0) -> int:
        return self.make("cuMemCreate", ctypes.c_uint64, size, properties(location_type, location_id), 0)

    def allocate(self, size: int) -> int:
        return self.make("cuMemAlloc", ctypes.c_uint64, size)

    def host_allocate(self, size: int) -> int:
        return self.make("cuMemHostAlloc", ctypes.c_void_p, size, 0)

    def stream(self, flags: int = 0) -> int:
        return self.make("cuStreamCreate", ctypes.c_void_p, flags)

    def event(self, flags: int = 2) -> int:
        return self.make("cuEventCreate", ctypes.c_void_p, flags)

    def access(
        self, address: int, size: int, flags: int = PROT_READWRITE, location: tuple[int, int] = (DEVICE, 0)
    ) -> int:
        """cuMemSetAccess for one location; returns the code."""
        return self.cuMemSetAccess(address, size, AccessDescription(Location(*location), flags), 1)

    def get_access(self, address: int, location: tuple[int, int] = (DEVICE, 0)) -> tuple[int, int]:
        flags = ctypes.c_uint64(99)
        return self.cuMemGetAccess(flags, Location(*location), address), flags.value

    def mapped(self, size: int, location_type: int = DEVICE) -> tuple[int, int]:
        """One handle mapped into a reservation of its own and accessible: (address, handle)."""
        address, handle = self.reserve(size), self.create(size, location_type)
        assert self.cuMemMap(address, size, 0, handle, 0) == SUCCESS
        assert self.access(address, size) == SUCCESS
        return address, handle

    def free_mapped(self, address: int, handle: int, size: int) -> None:
        assert self.cuMemUnmap(address, size) == SUCCESS
        assert self.cuMemRelease(handle) == SUCCESS
        assert self.cuMemAddressFree(address, size) == SUCCESS

    def read(self, address: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        assert self.cuMemcpyDtoH(buffer, address, size) == SUCCESS
        return buffer.raw

    def write(self, address: int, data: bytes) -> None:
        assert self.cuMemcpyHtoD(address, ctypes.create_string_buffer(data, len(data)), len(data)) == SUCCESS

    def attribute(self, attribute: int, device: int = 0) -> int:
        return self.make("cuDeviceGetAttribute", ctypes.c_int, attribute, device)

    def launch(self, stream: int, function: Callable[[], None]) -> int:
        """Queues a Python function on a stream."""
        callback = HOST_FUNCTION(lambda _: function())
        self.keep.append(callback)
        return self.cuLaunchHostFunc(stream, ctypes.cast(callback, ctypes.c_void_p).value, None)


def _function(address: int, signature: str) -> Callable[..., int]:
    function = ctypes.CFUNCTYPE(ctypes.c_int, *(CTYPES[letter] for letter in signature))(address)
    return lambda *arguments: function(*map(_argument, arguments))


def _argument(value: object) -> object:
    if isinstance(value, ctypes.Structure | ctypes._SimpleCData):
        return ctypes.cast(ctypes.pointer(value), ctypes.c_void_p)
    if isinstance(value, ctypes.Array):
        return ctypes.cast(value, ctypes.c_void_p)
    return value
