"""`_impl._mem_pools`: callers take a pool out of it and drop it, to get its memory back."""

import weakref
from typing import NamedTuple

from ebbtide.saver.reclaim import spilled


class Key(NamedTuple):
    """As callers write it. The backend is "" without a CPU backup; `device` is the current one."""

    tag: str
    enable_cpu_backup: bool
    enable_disk_backup: bool
    cpu_backup_backend: str
    device: int


class Pool:
    """The pools of a region on all devices. When it dies, torch may free what is free in them, or will be."""

    def __init__(self, tag: str, backup: int) -> None:
        weakref.finalize(self, spilled.dissolve, tag, backup).atexit = False


class MemPools(dict[Key, Pool]):
    """The pools of all regions so far."""

    def note(self, key: Key, tag: str, backup: int) -> None:
        """Called before a region is entered, with the saver's names for its tag and its backup."""
        if key not in self:
            self[key] = Pool(tag, backup)
