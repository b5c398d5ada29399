"""`_impl._mem_pools`: callers take a pool out of it and drop it, which frees its memory."""

import weakref
from typing import Any, NamedTuple

from ebbtide import _core
from ebbtide.saver.reclaim import spilled
from ebbtide.saver.values.arguments import backup_code


class Key(NamedTuple):
    """As callers write it. The backend is "" without a CPU backup; `device` is the current one."""

    tag: str
    enable_cpu_backup: bool
    enable_disk_backup: bool
    cpu_backup_backend: str
    device: int


class Pool:
    """The pools of a region on all devices. When it dies, torch may free their blocks that are free, now or later."""

    def __init__(self, tag: str, backup: int) -> None:
        weakref.finalize(self, spilled.dissolve, tag, backup).atexit = False


class MemPools(dict[Key, Pool]):
    """The pools of all regions so far. A key that is looked up before its first region gets a pool, as in a
    defaultdict."""

    def __missing__(self, key: Any) -> Pool:
        try:
            named = Key(*key)
        except TypeError:
            raise KeyError(key) from None
        on_host = "ram" if named.cpu_backup_backend == "mmap" else "pinned"
        backup = on_host if named.enable_cpu_backup else "disk" if named.enable_disk_backup else None
        self.note(named, _core.encode_tag(named.tag), backup_code(backup))
        return self[named]

    def note(self, key: Key, tag: str, backup: int) -> None:
        """Called before a region is entered, with the saver's names for its tag and its backup."""
        if key not in self:
            self[key] = Pool(tag, backup)
