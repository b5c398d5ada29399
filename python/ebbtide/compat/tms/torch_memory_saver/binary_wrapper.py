"""The library whose C symbols callers of torch_memory_saver use: the core of this process."""

import ctypes
import functools
from typing import Any

from ebbtide import _core

_BYTES = ctypes.POINTER(ctypes.c_uint8)
_RESULTS: dict[str, Any] = {
    "tms_get_current_tag": ctypes.c_char_p,
    "tms_get_interesting_region": ctypes.c_bool,
    "tms_get_enable_cpu_backup": ctypes.c_bool,
    "tms_get_cpu_backup_backend": ctypes.c_char_p,
    "tms_get_enable_disk_backup": ctypes.c_bool,
    "tms_get_retain_cpu_backup": ctypes.c_bool,
}
_ARGUMENTS: dict[str, Any] = {
    "tms_set_current_tag": ctypes.c_char_p,
    "tms_set_interesting_region": ctypes.c_bool,
    "tms_set_enable_cpu_backup": ctypes.c_bool,
    "tms_set_cpu_backup_backend": ctypes.c_char_p,
    "tms_set_enable_disk_backup": ctypes.c_bool,
    "tms_set_retain_cpu_backup": ctypes.c_bool,
    "tms_set_disk_backup_dir": ctypes.c_char_p,
    "set_memory_margin_bytes": ctypes.c_uint64,
}


class Library(ctypes.CDLL):
    """The core. Callers also look CUDA's runtime up in it, which is found in the process."""

    def __getitem__(self, name: Any) -> Any:
        try:
            return super().__getitem__(name)
        except AttributeError:
            return getattr(_process(), name)


@functools.cache
def _process() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class BinaryWrapper:
    """`_impl._binary_wrapper`.

    Args:
        path_binary: without effect: the core of this process is the library.
    """

    def __init__(self, path_binary: str = "") -> None:
        self.cdll = Library(_core.loaded_library())
        for name, result in _RESULTS.items():
            getattr(self.cdll, name).restype = result
        for name, argument in _ARGUMENTS.items():
            function = getattr(self.cdll, name)
            function.argtypes, function.restype = [argument], None
        for name in ("tms_pause", "tms_resume"):
            getattr(self.cdll, name).argtypes = [ctypes.c_char_p]
        self.cdll.tms_get_cpu_backup_pointer.argtypes = [_BYTES, ctypes.c_uint64]
        self.cdll.tms_get_cpu_backup_pointer.restype = _BYTES

    def set_config(
        self,
        *,
        tag: str,
        interesting_region: bool,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None = None,
        enable_disk_backup: bool = False,
    ) -> None:
        """Sets the policy of the calling thread, by the C symbols. In a region, its pools stay as they are."""
        self.cdll.tms_set_current_tag(tag.encode())
        self.cdll.tms_set_interesting_region(interesting_region)
        self.cdll.tms_set_enable_cpu_backup(enable_cpu_backup)
        if cpu_backup_backend is not None:
            self.cdll.tms_set_cpu_backup_backend(cpu_backup_backend.encode())
        self.cdll.tms_set_enable_disk_backup(enable_disk_backup)
