"""The names of IBM's Large Model Support for PyTorch, over `ebbtide.lms`.

    import ebbtide.compat.ibm_lms

    ebbtide.compat.ibm_lms.install()
    torch.cuda.set_limit_lms(12 * 2**30)
    torch.cuda.set_enabled_lms(True)

As there: the limit is in bytes, and 0 keeps device memory as small as can be; tensors smaller than the size stay.
`torch.cuda.memory_stats()` gets `reclaimed`, `reclaimed_bytes` and `alloc_distribution.*`, but not IBM's `pinned`.
"""

from typing import Any

import ebbtide.lms as lms
from ebbtide.lms import control

_NAMES = (
    *("set_enabled_lms", "get_enabled_lms", "set_limit_lms", "get_limit_lms", "set_size_lms", "get_size_lms"),
    *("reclaim_inactive", "memory_stats"),
)
_original_memory_stats: Any = None


def install() -> None:
    """Adds the functions to `torch.cuda`. Called again, it does nothing."""
    global _original_memory_stats
    import torch

    if _original_memory_stats is not None:
        return
    _original_memory_stats = torch.cuda.memory_stats
    if not control.is_enabled():
        control.set_limit(0)  # IBM's default
    for name in _NAMES:
        setattr(torch.cuda, name, globals()[name])


def uninstall() -> None:
    """Takes them away again."""
    global _original_memory_stats
    import torch

    if _original_memory_stats is None:
        return
    for name in _NAMES:
        delattr(torch.cuda, name)
    torch.cuda.memory_stats = _original_memory_stats
    _original_memory_stats = None


def set_enabled_lms(enable: bool) -> None:
    """Turns LMS on or off."""
    lms.enabled = bool(enable)


def get_enabled_lms() -> bool:
    """Whether LMS is on."""
    return control.is_enabled()


def _bytes(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number of bytes, not {value!r}")
    return int(value)


def set_limit_lms(limit: int) -> None:
    """The most device memory, in bytes; 0: as little as can be."""
    control.set_limit(_bytes(limit, "limit"))


def get_limit_lms() -> int:
    """The limit in bytes; 0 where there is none."""
    limit = control.limit()
    return 0 if isinstance(limit, str) else limit


def set_size_lms(size: int) -> None:
    """Tensors with less storage, in bytes, stay on the device."""
    control.set_min_size(_bytes(size, "size"))


def get_size_lms() -> int:
    """See `set_size_lms`."""
    return control.min_size()


def reclaim_inactive() -> None:
    """Evicts everything that can leave."""
    if control.is_enabled():
        control.evict(2**63 - 1)


def memory_stats(device: Any = None) -> dict[str, Any]:
    """torch's counters, with those that IBM added.

    reclaimed, reclaimed_bytes: storages that left. alloc_distribution.*: how allocations were served. reclaim_one
    counts those that had to wait for an eviction, whatever left for them; reclaim_fragments and reclaim_all, which IBM
    told apart, stay 0. freelist, cudamalloc and cudamalloc_retry are torch's, and 0 on the simulated device.
    """
    numbers, found = lms.stats(), _torch_stats(device)
    segments, retries = found.get("num_device_alloc", 0), found.get("num_alloc_retries", 0)
    return {
        **found,
        "reclaimed": numbers["evictions"],
        "reclaimed_bytes": numbers["evicted_bytes"],
        "alloc_distribution.freelist": max(0, found.get("allocation.all.allocated", 0) - segments),
        "alloc_distribution.cudamalloc": max(0, segments - retries),
        "alloc_distribution.reclaim_one": control.reclaims(),
        "alloc_distribution.reclaim_fragments": 0,
        "alloc_distribution.reclaim_all": 0,
        "alloc_distribution.cudamalloc_retry": retries,
    }


def _torch_stats(device: Any) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {}
    found: dict[str, Any] = _original_memory_stats(device)
    return found
