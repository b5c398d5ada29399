"""`TorchMemorySaver._impl`: each call as calls of the saver."""

import contextlib
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide import _core, driver_choice, saver, settings
from ebbtide.compat.torch_memory_saver import saver_tag
from ebbtide.errors import StateError
from ebbtide.saver.regions.graphs import GraphCapture, cuda_graph_in_place_of
from ebbtide.saver.regions.region import Region, Separate, Tagged, separate_memory
from ebbtide.saver.values.arguments import BackupName, backup_code

from torch_memory_saver.binary_wrapper import BinaryWrapper
from torch_memory_saver.pools import Key, MemPools

if TYPE_CHECKING:
    import torch

_is_disk_directory_read = False
_made_folders: set[str] = set()
_WEIGHTS = "weights"  # SGLang's tag
_BACKUPS: dict[str, BackupName] = {"mmap": "ram", "pinned": "pinned"}


class Implementation:
    """Moves the memory of this process's core. Its instances share everything but `_mem_pools`.

    Args:
        hook_mode: without effect.
    """

    def __init__(self, hook_mode: str = "preload") -> None:
        self._hook_mode = hook_mode
        self._binary_wrapper = BinaryWrapper()
        self._mem_pools = MemPools()

    def region(
        self, tag: str, enable_cpu_backup: bool, enable_disk_backup: bool, cpu_backup_backend: str | None
    ) -> Region:
        """See `TorchMemorySaver.region`."""
        backup = self._backup(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        inherited = cpu_backup_backend or self._thread_backend()
        backend = inherited if enable_cpu_backup else ""

        def note(frame: "_core.Frame") -> None:
            key = Key(tag, enable_cpu_backup, enable_disk_backup, backend, _current_device())
            self._mem_pools.note(key, saver_tag(tag), backup_code(backup))
            _open_regions().append((frame, inherited))
            if backup is None and tag == _WEIGHTS:
                _weights.are_dropped = True

        return _ObservedRegion(saver_tag(tag), backup, self._retains() and backup is not None, note)

    def cuda_graph(
        self,
        graph: Any,
        pool: Any,
        arguments: dict[str, Any],
        tag: str,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None,
    ) -> GraphCapture:
        """See `TorchMemorySaver.cuda_graph`."""
        backup = self._backup(enable_cpu_backup, False, cpu_backup_backend)
        return cuda_graph_in_place_of(pool, graph, saver_tag(tag), backup, arguments)

    def disable(self, dispose_mem_pool_after_use: bool = True) -> Separate:
        """See `TorchMemorySaver.disable`. Raises ValueError: the pool would be kept."""
        if not dispose_mem_pool_after_use:
            raise ValueError("dispose_mem_pool_after_use=False is not supported: free memory goes back at the end")
        return separate_memory()

    def _with_region_config(
        self, tag: str, enable_cpu_backup: bool, cpu_backup_backend: str | None, enable_disk_backup: bool = False
    ) -> Tagged:
        """The part of a region that concerns memory outside its pools: the thread's tag in a preloaded program."""
        backup = self._backup(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        return Tagged(saver_tag(tag), backup_code(backup))

    def pause(self, tag: str | None) -> None:
        """See `TorchMemorySaver.pause`."""
        _make_folder_again()
        if tag is None or tag in ("", _WEIGHTS):
            _warn_of_lost_tensors()
        saver.pause(*_tags(tag), missing_ok=True)

    def resume(self, tag: str | None) -> None:
        """See `TorchMemorySaver.resume`."""
        saver.resume(*_tags(tag), missing_ok=True, retain=self._retains())

    def get_cpu_backup(self, x: "torch.Tensor", zero_copy: bool) -> "torch.Tensor | None":
        """See `TorchMemorySaver.get_cpu_backup`."""
        where = saver.where(x)
        if where.tag is None:
            return None
        if where.dropped_bytes:
            raise StateError(
                f"a tensor of shape {tuple(x.shape)} is paused, and its content was dropped: allocate it in a region "
                "with enable_cpu_backup=True, or read it after a resume"
            )
        view = saver.backup_of(x, retained=True)
        return view if view is None or zero_copy else view.clone()

    def set_memory_margin_bytes(self, value: int) -> None:
        """See `TorchMemorySaver.memory_margin_bytes`. The C call of this name has no error to return."""
        text = settings.check(settings.find("device_margin"), value, "memory_margin_bytes", takes_text=False)
        saver.configure(device_margin=int(text))

    def set_disk_backup_dir(self, path: str) -> None:
        """See `TorchMemorySaver.set_disk_backup_dir`."""
        if not path:
            raise ValueError("the folder of disk backups has no name")
        folder = Path(path).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        _choose_files(str(folder))
        _made_folders.add(str(folder))
        self._binary_wrapper.cdll.tms_set_disk_backup_dir(os.fsencode(folder))  # so that C asks no variable any more

    def _use_disk_directory(self) -> None:
        """Once in a process: disk backups become named files, in TMS_DISK_BACKUP_DIR if it is set and no folder was
        chosen."""
        global _is_disk_directory_read
        if _is_disk_directory_read:
            return
        directory = os.environ.get("TMS_DISK_BACKUP_DIR")
        if directory and _source_of("disk_directory") == "default":
            self.set_disk_backup_dir(directory)
        else:
            _choose_files()
        _is_disk_directory_read = True

    def _backup(
        self, enable_cpu_backup: bool, enable_disk_backup: bool, cpu_backup_backend: str | None
    ) -> BackupName | None:
        if enable_cpu_backup:
            return _BACKUPS[cpu_backup_backend or self._thread_backend()]
        if enable_disk_backup:
            self._use_disk_directory()
        return "disk" if enable_disk_backup else None

    def _retains(self) -> bool:
        return bool(self._binary_wrapper.cdll.tms_get_retain_cpu_backup())

    def _thread_backend(self) -> str:
        """The backend of a region of this thread that names none: that of the region around it, also where that one
        keeps no backup."""
        regions = _open_regions()
        if regions and not self._binary_wrapper.cdll.tms_get_enable_cpu_backup():
            return regions[-1][1]
        backend: bytes = self._binary_wrapper.cdll.tms_get_cpu_backup_backend()
        return backend.decode()


class _Weights:
    are_dropped = False  # a region of them without a backup was entered
    were_looked_at = False


_weights = _Weights()


def _warn_of_lost_tensors() -> None:
    """Before the first pause that drops weights: names the tensors among them that nothing loads again. SGLang saves
    the buffers of its model and loads the parameters anew."""
    if not _weights.are_dropped or _weights.were_looked_at:
        return
    _weights.were_looked_at = True
    lost = saver.survivors(_WEIGHTS).unregistered
    if lost:
        warnings.warn(
            f"this pause drops the weights, and with them tensors that are neither parameters nor buffers of a model: "
            f"{lost.names()}. They come back as zeros: make them buffers, or keep the weights (enable_cpu_backup=True, "
            "in SGLang --enable-weights-cpu-backup)",
            RuntimeWarning,
            stacklevel=3,
        )


def _source_of(setting: str) -> str:
    """Its origin: "default", its variable, or "saver.configure(...)"."""
    return next(str(row["source"]) for row in _core.settings() if row["name"] == setting)


def _choose_files(folder: str | None = None) -> None:
    """torch_memory_saver's users look for the files in the folder, so they have names. ebbtide's variable comes
    first."""
    if not _source_of("disk_files").startswith("EBBTIDE_"):
        saver.configure(disk_files="named")
    if folder is not None:
        saver.configure(disk_directory=folder)


def _make_folder_again() -> None:
    """torch_memory_saver makes the folder of its backups at each of them. A failure shows where the backup is made."""
    if driver_choice.is_off():
        return
    folder = os.fsdecode(_core.get_setting("disk_directory"))
    if not folder:
        return
    with contextlib.suppress(OSError):  # a working directory that is gone, too
        if folder in _made_folders or folder == str(Path(os.environ.get("TMS_DISK_BACKUP_DIR", "")).absolute()):
            Path(folder).mkdir(parents=True, exist_ok=True)


_regions = threading.local()


def _open_regions() -> "list[tuple[_core.Frame, str]]":
    """The regions that this thread is in, each with the backend that it hands on."""
    _regions.entries = [entry for entry in getattr(_regions, "entries", ()) if not entry[0].is_closed]
    entries: list[tuple[_core.Frame, str]] = _regions.entries
    return entries


class _ObservedRegion(Region):
    """A region that calls a function with its frame whenever it is entered."""

    def __init__(
        self, tag: str, backup: BackupName | None, retain: bool, observe: Callable[["_core.Frame"], None]
    ) -> None:
        super().__init__(tag, backup=backup, retain=retain)
        self._observe = observe

    def _prepare(self, frame: "_core.Frame") -> bool:
        is_on = super()._prepare(frame)
        if is_on:
            self._observe(frame)
        return is_on


def _tags(tag: str | None) -> tuple[str, ...]:
    return () if tag is None or tag == "" else (saver_tag(tag),)


def _current_device() -> int:
    import torch

    return torch.cuda.current_device() if saver.device == "cuda" else 0
