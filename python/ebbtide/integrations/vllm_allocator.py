"""The allocator of vLLM's sleep mode, over `ebbtide.saver`: the surface of vLLM's `MemAllocator` and `CuMemAllocator`.

A tag of vLLM is a tag of ebbtide behind a prefix, so that sleeping never touches the tags of a trainer in the same
process. As in vLLM:

- `sleep` takes every tag off the device. It keeps the content of those that it is told to, and drops the others'.
- Memory that is asleep already keeps its content or not as the first call said, whatever a later `sleep` or `discard`
  says.
- `wake_up` with tags defers the weights and the KV cache that were not named. Every other tag always comes back.

Otherwise than in vLLM: a `sleep` or a `wake_up` that fails moves nothing, dropped memory comes back as zeros, and
memory that dies while weights load becomes free at each call of torch's `empty_cache`.
"""

import contextlib
import gc
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ebbtide import _core, saver
from ebbtide.errors import OutOfMemoryError
from ebbtide.saver.reclaim import retired, torch_cache
from ebbtide.saver.values.arguments import BackupName

if TYPE_CHECKING:
    import torch

PREFIX = "vllm."
DEFAULT_TAG = "default"
WEIGHTS_TAG = "weights"
GRAPH_TAG = "cudagraph"
RUNTIME_TAG = "runtime"
DEFERRABLE_TAGS = (WEIGHTS_TAG, "kv_cache")
KEPT_AT_EVERY_LEVEL = (RUNTIME_TAG, GRAPH_TAG)

_logger = logging.getLogger(__name__)

Hook = Callable[[], Any]


@dataclass(frozen=True)
class Allocation:
    """One segment of a tag, with the fields of vLLM's `AllocationData`.

    Attributes:
        handle: device ordinal, bytes, address, and 0 in place of vLLM's handle of the driver.
        tag: as vLLM names it.
        is_asleep: its memory is away.
    """

    handle: tuple[int, int, int, int]
    tag: str
    is_asleep: bool

    @property
    def cpu_backup_tensor(self) -> "torch.Tensor | None":
        """The stored bytes as a CPU tensor, without a copy; None while it is awake, and where they were dropped."""
        import torch

        backup = _core.backup_of(self.handle[2], self.handle[1]) if self.is_asleep else None
        if backup is None:
            return None
        with warnings.catch_warnings():  # torch has no read-only tensors
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(backup, dtype=torch.uint8)


class Allocator:
    """vLLM's allocator of weights, the KV cache and scratch. `allocator()` gives the one of this process.

    Args:
        backup: where `sleep` keeps content: "ram", "pinned" or "disk", as in `saver.region`.
        retain: keep the memory of backups for the next `sleep`, which then copies only changed blocks.
    """

    default_tag = DEFAULT_TAG

    def __init__(self, backup: BackupName = "ram", retain: bool = False) -> None:
        self.backup: BackupName = backup
        self.retain = retain
        self._has_looked = False  # for tensors that a sleep drops and nothing loads again
        self._open = threading.local()  # .pools: those that this thread is in, the innermost last

    @property
    def current_tag(self) -> str:
        """The tag of this thread's innermost pool."""
        pools = self._pools()
        return pools[-1].tag if pools else DEFAULT_TAG

    @property
    def pointer_to_data(self) -> dict[int, Allocation]:
        """Every allocation by its address, as it is now. A copy: changing it changes nothing."""
        found = {}
        for name in self._names():
            for info in _core.allocations(name):
                if not info.is_trimmed:
                    handle = (info.device, info.size_bytes, info.address, 0)
                    is_asleep = info.is_paused or info.resident_bytes == 0
                    found[info.address] = Allocation(handle, name.removeprefix(PREFIX), is_asleep)
        return found

    def get_current_usage(self) -> int:
        """The bytes of all allocations, those that are asleep included."""
        return sum(allocation.handle[1] for allocation in self.pointer_to_data.values())

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Memory that this thread allocates inside gets `tag` ("default" for None).

        Raises:
            TypeError: a tag that is no str.
            StateError, OutOfMemoryError: as `saver.region`.
        """
        name = _name(DEFAULT_TAG if tag is None else tag)
        pool = _OpenPool(name, self.backup, self.retain)
        with pool:
            self._pools().append(pool)
            try:
                yield
            finally:
                self._pools().remove(pool)
        if not any(other.name == name for other in self._pools()):
            retired.retire([name], only_with_free_segments=True)

    @contextlib.contextmanager
    def cudagraph_pool(self) -> Iterator[Any]:
        """For a capture: the id of the graph pool whose memory sleeps as the tag "cudagraph". Needs a GPU."""
        yield saver.graph_pool(_name(GRAPH_TAG), backup=self.backup)

    def trim(self) -> int:
        """Frees the free memory of this thread's pool, and lets torch free memory that dies in it from now on, while
        the pool stays open. Returns the bytes freed. Loading weights calls it where it empties torch's cache.
        """
        pools = self._pools()
        if not pools or pools[-1].is_left:  # freeing empties torch's cache, which leads here again
            return 0
        name = pools[-1].name
        if sum(pool.name == name for pool in pools) > 1 or saver.is_paused(name):
            return 0
        with pools[-1].left():
            gone = retired.retire([name])
        return sum(info.resident_bytes for info in gone)

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Takes all memory off the device. Keeps the content of `offload_tags` (None: of "default"), drops the rest.

        Raises:
            TypeError: neither a tuple nor a str.
            StateError, StoreError, DriverError: as `saver.pause`.
        """
        kept = {_name(tag) for tag in _as_tags((DEFAULT_TAG,) if offload_tags is None else offload_tags)}
        self._put_to_sleep({name: self.backup if name in kept else None for name in self._names()})

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """Takes the memory of `tags` off the device and drops its content. Other tags stay as they are.

        Raises:
            As `sleep`.
        """
        names = {_name(tag) for tag in _as_tags(tags)}
        self._put_to_sleep({name: None for name in self._names() if name in names})

    def wake_up(self, tags: Sequence[str] | str | None = None) -> None:
        """Brings memory back: all of it, or with `tags` these and every tag other than weights and KV cache.

        Raises:
            OutOfMemoryError: the device has too little room. Nothing came back; the same call works once there is room.
            StateError, StoreError, DriverError: as `saver.resume`.
        """
        asleep = [name for name in self._names() if saver.is_paused(name)]
        tags = (tags,) if isinstance(tags, str) else tags
        wanted = {_name(tag) for tag in (DEFERRABLE_TAGS if tags is None else tags)}
        deferred = {_name(tag) for tag in DEFERRABLE_TAGS} - wanted
        names = [name for name in asleep if name not in deferred]
        if names:
            try:
                saver.resume(*names)
            except OutOfMemoryError:
                gc.collect()
                saver.resume(*names)
        _run_vllm_hooks("run_after_map_hooks", self.pointer_to_data)

    def register_tag_hooks(self, tag: str, before_unmap: Hook, after_map: Hook) -> Callable[[], None]:
        """Calls `before_unmap` before memory of `tag` goes to sleep, and `after_map` once it is back.

        Returns:
            A callable that removes both.
        """
        name = _name(tag)
        removals = [
            saver.on("before_pause", name, lambda _: before_unmap()),
            saver.on("after_resume", name, lambda _: after_map()),
        ]

        def remove() -> None:
            for each in removals:
                each()

        return remove

    def release_pools(self) -> None:
        """Frees the memory that nothing uses. vLLM calls it at shutdown."""
        retired.retire([name for name in self._names() if not saver.is_paused(name)])

    close = release_pools

    def _pools(self) -> "list[_OpenPool]":
        pools: list[_OpenPool] = self._open.__dict__.setdefault("pools", [])
        return pools

    def _names(self) -> list[str]:
        return [info.tag for info in _core.tags() if info.tag.startswith(PREFIX)]

    def _put_to_sleep(self, policies: Mapping[str, BackupName | None]) -> None:
        gc.collect()  # dead tensors need not be kept
        awake = {}
        for name, backup in policies.items():
            info = _core.query_tag(name)
            if info is not None and info.resident_bytes > info.paused_host_bytes:
                awake[name] = backup
            elif info is not None and (info.stored_bytes if backup is None else info.dropped_bytes):
                _logger.warning("vLLM's tag %r is asleep already, and stays as it is", name.removeprefix(PREFIX))
        _run_vllm_hooks("run_before_unmap_hooks", self.pointer_to_data, [name.removeprefix(PREFIX) for name in awake])
        if _name(WEIGHTS_TAG) in awake and awake[_name(WEIGHTS_TAG)] is None and not self._has_looked:
            self._has_looked = True
            _warn_of_lost_tensors(_name(WEIGHTS_TAG))
        if awake:
            saver.pause(awake)
        torch_cache.empty()


class _OpenPool:
    """A region that may be left for a moment."""

    def __init__(self, name: str, backup: BackupName, retain: bool) -> None:
        self.name = name
        self.tag = name.removeprefix(PREFIX)
        self._region = saver.region(name, backup=backup, retain=retain)
        self._is_inside = False
        self.is_left = False

    def __enter__(self) -> None:
        self._region.__enter__()
        self._is_inside = True

    def __exit__(self, *failure: Any) -> None:
        if self._is_inside:  # not where coming back to it failed
            self._is_inside = False
            self._region.__exit__(*failure)

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """A `with` outside the region."""
        self.__exit__(None, None, None)
        self.is_left = True
        try:
            yield
        finally:
            self.is_left = False
            self.__enter__()


def _warn_of_lost_tensors(name: str) -> None:
    """Names the tensors among the weights that vLLM neither saves as buffers nor loads as weights."""
    lost = saver.survivors(name).unregistered
    if not lost:
        return
    warnings.warn(
        f"this sleep drops the weights, and with them tensors that are neither parameters nor buffers of a model: "
        f"{lost.names()}. vLLM does not load them again, and they come back as zeros. Make them buffers, or make "
        f'them in CuMemAllocator.get_instance().use_memory_pool(tag="{RUNTIME_TAG}"), which every sleep keeps',
        RuntimeWarning,
        stacklevel=4,
    )


def _run_vllm_hooks(name: str, allocations: Mapping[int, Allocation], *tags: Any) -> None:
    """Runs the tag hooks of a vLLM that has them, as its own allocator does."""
    run = getattr(sys.modules.get("vllm.device_allocator"), name, None)
    if run is not None:
        run(allocations.values(), *tags)


_own = Allocator()


def allocator() -> Allocator:
    """The allocator of this process."""
    return _own


def _name(tag: object) -> str:
    if not isinstance(tag, str):
        raise TypeError(f"a tag is a str, not {type(tag).__name__}")
    return PREFIX + tag


def _as_tags(tags: object) -> tuple[Any, ...]:
    if isinstance(tags, str):
        return (tags,)
    if not isinstance(tags, tuple):
        raise TypeError(f"tags are a str or a tuple of them, not {type(tags).__name__}")
    return tags
