"""vLLM's sleep mode on ebbtide.

    vllm serve MODEL --enable-sleep-mode --sleep-mode-backend ebbtide      # vLLM 0.26 or newer
    EBBTIDE_VLLM=1 vllm serve MODEL --enable-sleep-mode                    # any vLLM that has a sleep mode
    ebbtide.integrations.vllm.use(backup="pinned")                         # one line in the worker's process

vLLM calls `register` in each of its processes, through the entry point group `vllm.general_plugins`. The first way
selects by name, and nothing changes where another backend is selected. The other two put ebbtide's allocator in the
place of vLLM's own, whatever calls it: the backend "cumem" then sleeps and wakes ebbtide's memory.
"""

import contextlib
import functools
import logging
import os
import sys
from typing import Any

from ebbtide import settings
from ebbtide.errors import StateError
from ebbtide.integrations import vllm_allocator
from ebbtide.saver.values.arguments import BackupName, backup_code, retain_flag

BACKEND_NAME = "ebbtide"

_logger = logging.getLogger(__name__)


def register() -> None:
    """Makes the backend "ebbtide" known to vLLM, and uses it throughout where EBBTIDE_VLLM=1. Called again, it does
    nothing.

        ebbtide.integrations.vllm.register()

    In a vLLM without pluggable backends (before 0.26) only EBBTIDE_VLLM=1 and `use` have an effect.
    """
    factory = _factory()
    if factory is not None:
        with contextlib.suppress(ValueError):  # it is registered already
            factory.register_backend(BACKEND_NAME, "ebbtide.integrations.vllm_backend", "EbbtideBackend")
        _watch_workers()
        _let_graphs_sleep()
    if settings.read_or_fallback("vllm", os.environ) == "1":
        _take_over()


def use(backup: BackupName = "ram", retain: bool = False) -> None:
    """From now on vLLM's sleep mode in this process uses ebbtide's memory, whichever backend is selected.

        ebbtide.integrations.vllm.use(backup="pinned", retain=True)

    Args:
        backup: where the content of weights goes at level 1: "ram", "pinned" or "disk", as in `saver.region`.
        retain: keep the memory of backups while vLLM is awake. The next sleep copies only changed blocks.

    Raises:
        ValueError, TypeError: malformed arguments.
        StateError: vLLM has allocated with its own allocator already, or has none on this platform.
    """
    code = backup_code(backup)
    if backup is None:
        raise ValueError('backup must be "ram", "pinned" or "disk": without one, level 1 would lose the weights')
    own = vllm_allocator.allocator()
    own.backup, own.retain = backup, retain_flag(retain, code)
    _take_over()


def is_in_use() -> bool:
    """Whether vLLM in this process gets its memory from ebbtide.

    For example:

        print(ebbtide.integrations.vllm.is_in_use())
    """
    from vllm.device_allocator import cumem

    return cumem.CuMemAllocator.instance is vllm_allocator.allocator()


def _take_over() -> None:
    _take_the_place_of_vllms()
    _trim_where_torch_empties_its_cache()


def _take_the_place_of_vllms() -> None:
    """Everything in vLLM gets its allocator from `CuMemAllocator.get_instance`, which returns this attribute."""
    from vllm.device_allocator import cumem

    own = vllm_allocator.allocator()
    theirs = cumem.CuMemAllocator.instance
    if theirs is own:
        return
    if not cumem.cumem_available:
        raise StateError("this vLLM has no sleep mode on this platform: its allocator's extension is missing")
    if theirs is not None and theirs.pointer_to_data:
        raise StateError(
            "vLLM's own allocator holds memory in this process already: call use() before a model is loaded"
        )
    cumem.CuMemAllocator.instance = own


def _trim_where_torch_empties_its_cache() -> None:
    """torch's `empty_cache` frees nothing of an open pool. vLLM calls it between and after the steps of a load."""
    import torch

    for owner in (torch.cuda.memory, torch.cuda, getattr(torch, "accelerator", None)):
        empty = getattr(owner, "empty_cache", None)
        if empty is not None and not hasattr(empty, "_ebbtide_trims"):
            owner.empty_cache = _trimming(empty)  # type: ignore[union-attr]


def _trimming(empty: Any) -> Any:
    @functools.wraps(empty)
    def empty_and_trim() -> None:
        vllm_allocator.allocator().trim()
        empty()

    empty_and_trim._ebbtide_trims = True  # type: ignore[attr-defined]
    return empty_and_trim


def _watch_workers() -> None:
    """A worker allocates before it asks for its backend. So each notes at its construction which one is selected."""
    try:
        from vllm.v1.worker.worker_base import WorkerBase
    except ImportError as error:  # the backend says so where it is selected, and others are not concerned
        _logger.debug("vLLM's workers are not where they were, so that only EBBTIDE_VLLM=1 has an effect: %r", error)
        return
    construct = WorkerBase.__init__
    if hasattr(construct, "_ebbtide_watches"):
        return

    @functools.wraps(construct)
    def construct_and_look(worker: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(vllm_config.model_config, "sleep_mode_backend", "") == BACKEND_NAME:
            _take_over()
        construct(worker, vllm_config, *args, **kwargs)

    construct_and_look._ebbtide_watches = True  # type: ignore[attr-defined]
    WorkerBase.__init__ = construct_and_look


def _let_graphs_sleep() -> None:
    """vLLM gives captures the graph pool of its allocator where the backend's name is "cumem". This one has such a pool
    as well, so its name counts as that one there."""
    config: Any = getattr(sys.modules.get("vllm.config"), "VllmConfig", None)
    asked = getattr(config, "use_cumem_cudagraph_pool", None)
    if not isinstance(asked, property) or hasattr(asked.fget, "_ebbtide_answers"):
        return
    own: Any = asked.fget

    @functools.wraps(own)
    def answer(vllm_config: Any) -> Any:
        model_config = vllm_config.model_config
        if getattr(model_config, "sleep_mode_backend", "") != BACKEND_NAME:
            return own(vllm_config)
        return own(_View(vllm_config, model_config=_View(model_config, sleep_mode_backend="cumem")))

    answer._ebbtide_answers = True  # type: ignore[attr-defined]
    config.use_cumem_cudagraph_pool = property(answer)


class _View:
    """An object as it is, but for some attributes."""

    def __init__(self, viewed: Any, **others: Any) -> None:
        self._viewed = viewed
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._viewed, name)


def _factory() -> Any:
    """vLLM's factory of backends; None in versions that have none."""
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("vllm"):
            raise
        return None
    return SleepModeBackendFactory
