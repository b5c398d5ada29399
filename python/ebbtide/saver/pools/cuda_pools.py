"""Pools on a GPU: `torch.cuda.MemPool` over the entry points of one slot each.

torch's behaviour, and this file's answers. Read in torch 2.6 to 2.13 and measured on 2.11; tests hold the
names and their arguments up to 2.15.

- A pool that dies while another one is open, or after a failed capture, ends the process from a destructor. If it was
  the last use, its destructor waits for events. So no pool dies while it may be entered: a leaked reference keeps the
  object past interpreter exit, and a use count that is never given back keeps torch from freeing its memory.
- torch frees the free segments of a pool without users at its next flush, through the pool's own allocator (from 2.8
  on), and forgets the pool once it is empty. Such a pool can't be entered again. `empty_cache` is a flush, also while
  other pools are open.
- To end a pool, the object dies first, which is harmless while our own use count is left. Then that count is given back
  the way it was taken: newer torch keeps both counts for its pinned memory as well, which has no object. Before 2.10
  the object asserts in its destructor that nothing else counts, which ends the process (2.8 for sure, and the sources
  on the way to 2.9). There no pool is dissolved.
- Before 2.8 a pool takes every thread's allocations and needs a MemPoolContext for its thread, and
  `_cuda_endAllocateToPool` has another name.
- Until some version before 2.11 the pool that was entered first wins, not the inner one. There, regions leave the outer
  pool before they enter an inner one.
- A pool is bound to the device that is current when it is made. Making it must not create a context on that device,
  which takes half a gigabyte. Hence `_cuda_maybeExchangeDevice`.
- `use_on_oom` would hand region memory to allocations outside. It is never set.
- `memory_snapshot` releases a reference to each number of the pool's id that it never took (2.11). A number above 256
  belongs to its tuple alone, so from pool 257 on the second snapshot of a pool would read freed memory.
"""

import ctypes
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from ebbtide import _core
from ebbtide.errors import StateError
from ebbtide.saver.pools.backends import PoolUse, Separation
from ebbtide.saver.values.segments import Segment, read_cuda_segments
from ebbtide.saver.values.survivors import UsedBlock
from ebbtide.torch_support import expandable_segments
from ebbtide.torch_support.torch_names import end_allocate, find
from ebbtide.torch_support.versions import torch_version

THREAD_POOLS_FROM = (2, 8)
INNER_BEATS_ALL_FROM = (2, 11)
DISSOLVE_FROM = (2, 10)
POOLS_FLUSH_FROM = (2, 13)
_MOST_SMALL_NUMBER = 256  # CPython has each up to this once
_SMALL_NUMBERS_ARE_IMMORTAL = sys.version_info >= (3, 12)
FEW_POOLS = 8  # asked about one by one; the snapshot of all pools lists everything that torch holds
OWN_USES = 2  # use counts of a pool: the object's, and the one from `make`

_immortal: dict[int, Any] = {}  # by id()


class CudaPool:
    """One torch pool of one device."""

    __slots__ = ("device", "id", "mem_pool")

    def __init__(self, mem_pool: Any, device: int) -> None:
        self.mem_pool = mem_pool
        # torch's id of the pool, for `torch.cuda.graph(pool=)` and `_cuda_beginAllocateToPool`.
        self.id: tuple[int, int] = mem_pool.id
        self.device = device

    def activation(self) -> Sequence[PoolUse]:
        """Before torch 2.8: the object that makes this the thread's active pool, for as long as it lives."""
        context = getattr(torch._C, "_MemPoolContext", None)  # torch.cuda's is a class of Python
        return () if context is None else (PoolUse(context, (self.mem_pool,), ()),)


class CudaPools:
    """`pools.PoolBackend` over torch's CUDA caching allocator."""

    device_type = "cuda"

    def __init__(self, version: tuple[int, int]) -> None:
        self.inner_beats_all = version >= INNER_BEATS_ALL_FROM
        self.one_thread_only = version < THREAD_POOLS_FROM
        self.flushes_first = version >= POOLS_FLUSH_FROM
        self._can_dissolve = version >= DISSOLVE_FROM
        begin_all = find("_C._cuda_beginAllocateToPool")
        self._begin_all = begin_all
        self._begin = begin_all if self.one_thread_only else find("_C._cuda_beginAllocateCurrentThreadToPool")
        self._end = end_allocate()
        self._release = find("_C._cuda_releasePool")

    def devices(self) -> Sequence[int]:
        """Every visible device. Before torch 2.8, where a thread has one active pool, the current device."""
        return (torch.cuda.current_device(),) if self.one_thread_only else range(torch.cuda.device_count())

    def make(self, slot: int, device: int, tag: str) -> CudaPool:
        """See PoolBackend."""
        allocator = find("_C._cuda_customAllocator")(*_core.torch_functions(slot))
        _keep_forever(allocator)  # torch before 2.10 holds the bare pointer
        mem_pool = torch.cuda.MemPool.__new__(torch.cuda.MemPool)
        _keep_forever(mem_pool)  # kept before it is initialised, so that an interrupt in between does not let it die
        with _MadeOn(device):
            mem_pool.__init__(allocator)
        pool = CudaPool(mem_pool, device)
        # Begins without a release: this use count is never given back.
        _core.call_together((self._begin, (device, pool.id)), (self._end, (device, pool.id)))
        return pool

    def segments_of(self, pools: Sequence[CudaPool]) -> Sequence[Sequence[Segment] | None]:
        """See PoolBackend. torch before 2.9 does not list the segments of one pool."""
        if not _parameters(torch.cuda.memory_snapshot):
            return [None] * len(pools)
        if len(pools) <= FEW_POOLS:
            return [_segments(pool) for pool in pools]
        by_pool = snapshot_by_pool()
        return [read_cuda_segments(by_pool.get(pool.id, ())) for pool in pools]

    def used_blocks(self, pools: Sequence[CudaPool]) -> Sequence[UsedBlock]:
        """See PoolBackend. Of all pools, those of graphs and the default one too."""
        return read_used_blocks(take_snapshot())

    def dissolve(self, pool: CudaPool) -> bool:
        """See PoolBackend."""
        if not self._can_dissolve or pool.mem_pool.use_count() != OWN_USES:
            return False
        _let_die(pool.mem_pool)
        pool.mem_pool = None
        self._release(pool.device, pool.id)
        return True

    def give_back(self, dissolved: Sequence[CudaPool]) -> None:
        """See PoolBackend. torch frees those of all dissolved pools at once."""
        if dissolved:
            torch.cuda.empty_cache()

    def uses(self, pool: CudaPool, takes_all_threads: bool) -> Sequence[PoolUse]:
        """See PoolBackend."""
        if takes_all_threads and self.one_thread_only:
            raise StateError(
                f'region(threads="all") needs torch 2.8 or newer, and this is {torch.__version__}: '
                "make the buffers that other threads fill (gradients) beforehand"
            )
        begin = self._begin_all if takes_all_threads else self._begin
        return (*pool.activation(), PoolUse(begin, (pool.device, pool.id), (self._end, self._release)))

    def suspension(self) -> Sequence[PoolUse]:
        """See PoolBackend. torch cannot exclude one thread: pools that other threads opened for all stay open."""
        return ()

    def separate(self) -> Separation:
        """See PoolBackend. Each pool is a bare id, like that of a capture. One use of it is ours until the end: a pool
        without uses can't be entered again."""
        pools = [(device, torch.cuda.graph_pool_handle()) for device in self.devices()]
        _core.call_together(*((function, pool) for pool in pools for function in (self._begin, self._end)))
        uses = [PoolUse(self._begin, pool, (self._end, self._release)) for pool in pools]
        return Separation(uses, [(self._release, pool) for pool in pools])


def _segments(pool: CudaPool) -> list[Segment]:
    for number in pool.id:
        if not _SMALL_NUMBERS_ARE_IMMORTAL or number > _MOST_SMALL_NUMBER:
            _keep_another_reference(number)
    return read_cuda_segments(take_snapshot(pool.id))


class _MadeOn(_core.Scope):
    """Makes `device` the current one without creating its context."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._before: int | None = None

    def _open(self) -> None:
        torch.cuda.init()
        self._before = torch.cuda.current_device()
        find("_C._cuda_maybeExchangeDevice")(self._device)

    def _close(self) -> None:
        if self._before is not None:
            find("_C._cuda_setDevice")(self._before)


def _keep_forever(thing: Any) -> None:
    _immortal[id(thing)] = thing
    _keep_another_reference(thing)


def _keep_another_reference(thing: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _let_die(thing: Any) -> None:
    """Undoes `_keep_forever`: the object dies with the last reference that the caller has."""
    del _immortal[id(thing)]
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))


@lru_cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def take_snapshot(*pool_id: Any) -> Any:
    """torch's snapshot of one pool (from 2.9 on) or of all pools, without traces where this torch can leave them
    out."""
    known = _parameters(torch.cuda.memory_snapshot)
    without_traces = {"include_traces": False} if "include_traces" in known else {}
    return torch.cuda.memory_snapshot(*pool_id, **without_traces)


def snapshot_by_pool() -> dict[tuple[int, int], list[Any]]:
    """The segments in a snapshot of all pools, by the id of their pool."""
    by_pool: dict[tuple[int, int], list[Any]] = {}
    for segment in take_snapshot():
        by_pool.setdefault(tuple(segment["segment_pool_id"]), []).append(segment)
    return by_pool


def read_used_blocks(snapshot: Sequence[Mapping[str, Any]]) -> list[UsedBlock]:
    """The blocks in a result of `torch.cuda.memory_snapshot` that are in use. Their frames are those of Python, and
    there only where `torch.cuda.memory._record_memory_history` was called before."""
    return [
        UsedBlock(block["address"], block["size"], tuple(_python_frames(block.get("frames", ()))))
        for segment in snapshot
        for block in segment["blocks"]
        if block["state"] != "inactive"
    ]


def _python_frames(frames: Sequence[Mapping[str, Any]]) -> list[str]:
    python = [frame for frame in frames if str(frame["filename"]).endswith(".py")]
    return [f"{frame['filename']}:{frame['line']} in {frame['name']}" for frame in python]


def make_backend() -> CudaPools:
    """Checks the version of torch and the settings of its allocator."""
    version = torch_version(torch.__version__)
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise StateError(
            f"torch's allocator backend is {backend!r}, which has no pools: "
            f"remove backend:{backend} from PYTORCH_CUDA_ALLOC_CONF"
        )
    expandable_segments.keep_off(version)
    return CudaPools(version)
