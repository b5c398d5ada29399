"""The class of torch_memory_saver, whose instances all move the memory of one core."""

from typing import TYPE_CHECKING, Any, Literal

from torch_memory_saver.hooks.base import HookMode
from torch_memory_saver.implementation import Implementation

if TYPE_CHECKING:
    import torch
    from ebbtide.saver.regions.graphs import GraphCapture
    from ebbtide.saver.regions.region import Region, Separate

CpuBackupBackend = Literal["mmap", "pinned"]

_TAG_DEFAULT = "default"
_TorchMemorySaverImpl = Implementation  # by the name that patches of other packages import
_HOOK_MODES = ("preload", "torch")


class TorchMemorySaver:
    """Pauses and resumes tensors by tag. Made by callers as often as they like."""

    def __init__(self) -> None:
        self._impl: Implementation | None = None
        self._impl_ctor_kwargs: dict[str, Any] = {}  # there until the first use, as callers know it
        self._hook_mode: HookMode = "preload"

    def region(
        self,
        tag: str = _TAG_DEFAULT,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> "Region":
        """Memory that this thread allocates inside has the tag: `saver.region`. A context manager and a decorator.

        Args:
            tag: any text.
            enable_cpu_backup: a pause keeps the content in host memory.
            enable_disk_backup: a pause keeps it in a file in the folder of `set_disk_backup_dir`. With neither, the
                content is dropped, and the memory comes back as zeros.
            cpu_backup_backend: "pinned" or "mmap", which is ebbtide's "ram". Default: TMS_INIT_CPU_BACKUP_BACKEND, else
                pinned.

        Raises:
            ValueError: both backups, or a backend without enable_cpu_backup.
        """
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        if enable_cpu_backup and enable_disk_backup:
            raise ValueError("enable_cpu_backup and enable_disk_backup are mutually exclusive: choose one")
        return self._ensure_initialized().region(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend)

    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = _TAG_DEFAULT,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> "GraphCapture":
        """`torch.cuda.graph`, with the graph's memory under a tag. A context manager and a decorator.

        Args:
            cuda_graph: the torch.cuda.CUDAGraph to capture into.
            pool: the id of a pool that graphs share. In a preloaded program their memory lies in it; elsewhere in a
                pool of ebbtide's for each tag and backup, for which the id stands during the capture.
            stream, capture_error_mode: torch.cuda.graph's.
            tag, enable_cpu_backup, cpu_backup_backend: as in `region`.

        Raises:
            ValueError: as in `region`.
            StateError: no GPU; or the shared pool is paused.
        """
        _check_backend(enable_cpu_backup, cpu_backup_backend)
        arguments = {"stream": stream, "capture_error_mode": capture_error_mode}
        return self._ensure_initialized().cuda_graph(
            cuda_graph, pool, arguments, tag, enable_cpu_backup, cpu_backup_backend
        )

    def disable(self) -> "Separate":
        """Gives this thread ordinary memory, which CUDA IPC can export. Its free part goes back to the device at the
        end. A context manager and a decorator."""
        return self._ensure_initialized().disable()

    def pause(self, tag: str | None = None) -> None:
        """Takes memory off the device: `saver.pause`. A tag that is paused, or does not exist, is skipped.

        Args:
            tag: None or "": every tag.

        Raises:
            StateError, StoreError, DriverError: as in `saver.pause`.
        """
        self._ensure_initialized().pause(tag)

    def resume(self, tag: str | None = None) -> None:
        """Brings memory back to the same addresses: `saver.resume`. A tag that is resident, or does not exist, is
        skipped.

        Raises:
            OutOfMemoryError: a torch.OutOfMemoryError: no room, and no tensor moved; the same call works later.
            StateError, StoreError, DriverError: as in `saver.resume`.
        """
        self._ensure_initialized().resume(tag)

    @property
    def enabled(self) -> bool:
        """True."""
        return True

    @property
    def hook_mode(self) -> HookMode:
        """The value that was set. It changes nothing: regions work with the preload library and without."""
        return self._hook_mode

    @hook_mode.setter
    def hook_mode(self, hook_mode: HookMode) -> None:
        if hook_mode not in _HOOK_MODES:
            raise ValueError(f"hook_mode is {' or '.join(_HOOK_MODES)}, not {hook_mode!r}")
        self._hook_mode = hook_mode
        if self._impl is None:
            self._impl_ctor_kwargs["hook_mode"] = hook_mode

    @property
    def memory_margin_bytes(self) -> int:
        """An allocation is refused where less than this would be free on its device afterwards.

        Raises:
            TypeError, ValueError: when set: no number of bytes, a negative one, or more than any memory.
        """
        raise NotImplementedError("memory_margin_bytes can only be set")

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        self._ensure_initialized().set_memory_margin_bytes(value)

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether a resume keeps the host memory of backups. Default: TMS_RETAIN_CPU_BACKUP, else False."""
        return bool(self._ensure_initialized()._binary_wrapper.cdll.tms_get_retain_cpu_backup())

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._ensure_initialized()._binary_wrapper.cdll.tms_set_retain_cpu_backup(value)

    def get_cpu_backup(self, x: "torch.Tensor", zero_copy: bool = False) -> "torch.Tensor | None":
        """The backup of a tensor that is paused, or whose backup was retained, as a CPU tensor; None without one.

        Args:
            x: a tensor. One outside all regions has no backup.
            zero_copy: a view of the backup instead of a copy.

        Raises:
            StateError: its content was dropped.
        """
        return self._ensure_initialized().get_cpu_backup(x, zero_copy)

    def set_disk_backup_dir(self, path: str) -> None:
        """The folder of disk backups that are made from now on; it is made if it is missing."""
        self._ensure_initialized().set_disk_backup_dir(path)

    def _ensure_initialized(self) -> Implementation:
        if self._impl is None:
            # Another thread may be the first one at the same time: each makes one, over the same core.
            self._impl = _TorchMemorySaverImpl(**vars(self).pop("_impl_ctor_kwargs", {}))
        return self._impl


def _check_backend(enable_cpu_backup: bool, cpu_backup_backend: str | None) -> None:
    if cpu_backup_backend is None:
        return
    if not enable_cpu_backup:
        raise ValueError("cpu_backup_backend requires enable_cpu_backup=True")
    if cpu_backup_backend not in ("mmap", "pinned"):
        raise ValueError(f"cpu_backup_backend is mmap or pinned, not {cpu_backup_backend!r}")
