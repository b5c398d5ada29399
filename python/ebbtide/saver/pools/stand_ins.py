"""Pools of ours that stand in for a pool that the caller named, and torch's answers about the caller's.

A capture in the place of the caller's pool goes into one of ours, whose id the caller does not know. So from the first
such capture on, torch's functions that take the id of a pool are wrapped:

- During the capture, those that begin, end and release the caller's pool act on ours. SGLang ends its graph pool inside
  a capture, allocates symmetric memory, and begins the pool again.
- A snapshot of the caller's pool has the segments of ours, too. SGLang looks there for blocks that graphs leave free.

Outside of a capture the caller's pool can be used as before, beside ours.
"""

import functools
from typing import Any

from ebbtide.locks import make_lock
from ebbtide.torch_support import torch_names

PoolId = tuple[int, int]

_lock = make_lock()
_installed = False
_known: dict[tuple[int, ...], set[PoolId]] = {}  # the caller's pools, and those of ours that stood in for each
_captured: dict[tuple[int, PoolId], tuple[object, PoolId]] = {}  # while a capture runs, by device and caller's pool


def begin(capture: object, device: int, named: PoolId, ours: PoolId) -> None:
    """From now on `ours` stands in for the caller's pool `named` in this capture. A capture of the same pool that is
    under way keeps its own: torch refuses the second."""
    _install()
    with _lock:
        _known.setdefault(named, set()).add(ours)
        _captured.setdefault((device, named), (capture, ours))


def end(capture: object) -> None:
    """The capture is over. A second call does nothing."""
    with _lock:
        for key in tuple(key for key, (owner, _) in _captured.items() if owner is capture):
            del _captured[key]


def _install() -> None:
    """Wraps the functions in torch and in the module that has imported them. Further calls do nothing."""
    global _installed
    import torch

    with _lock:
        if _installed:
            return
        _wrap((torch._C, torch.cuda.memory), torch_names.POOL_FUNCTIONS, _of_capture)
        _wrap((torch.cuda.memory, torch.cuda), ["memory_snapshot"], _of_all)
        _installed = True


def _wrap(modules: "tuple[Any, ...]", names: list[str], make_wrapper: Any) -> None:
    for name in names:
        original = next((getattr(module, name) for module in modules if hasattr(module, name)), None)
        if original is None or hasattr(original, torch_names.ORIGINAL):  # an interrupt came in between
            continue
        wrapper = functools.wraps(original)(make_wrapper(original))
        setattr(wrapper, torch_names.ORIGINAL, original)
        for module in modules:
            if getattr(module, name, None) is original:
                setattr(module, name, wrapper)


def _of_capture(function: Any) -> Any:
    def call(device: int, mempool_id: Any) -> Any:
        _, pool_id = _captured.get((device, tuple(mempool_id)), (None, mempool_id))
        return function(device, pool_id)

    return call


def _of_all(snapshot: Any) -> Any:
    def memory_snapshot(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("mempool_id")
        named = () if given is None else tuple(given)
        if named not in _known:
            return snapshot(*args, **kwargs)
        kwargs.pop("mempool_id", None)
        wanted = {named, *_known[named]}
        segments = snapshot(*((None, *args[1:]) if args else ()), **kwargs)
        return [segment for segment in segments if tuple(segment["segment_pool_id"]) in wanted]

    return memory_snapshot
