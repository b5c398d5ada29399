"""What large model support needs of a kind of device: whose memory it moves, and how a limit holds."""

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Protocol, TypeVar

from ebbtide import _core, torch_extension
from ebbtide.errors import Error
from ebbtide.locks import make_lock
from ebbtide.saver.operations.hooked_operation import after_resumes
from ebbtide.saver.operations.trim import trim
from ebbtide.saver.pools import captures
from ebbtide.saver.pools.region_pools import registry
from ebbtide.saver.regions import entry, startup
from ebbtide.saver.regions.region import disabled, region
from ebbtide.saver.values.arguments import NO_OVERFLOW_CODE, backup_code
from ebbtide.torch_support import expandable_segments
from ebbtide.torch_support.gpu_memory import limit_of_torch, limit_torch, memories, used_devices

_T = TypeVar("_T")
TAG = "lms"
OVERFLOW_TAG = "lms.overflow"
_WATCHES_NOTHING, _WATCHES_FLUSHES, _WATCHES_ALL = range(3)  # csrc/torch/lms/cuda_side.h
_IN_REGION = 2  # EBBTIDE_TAGGING_ON of csrc/api/ebbtide_threads.h
_HOLDER = "large model support (name the tags that you mean, or call ebbtide.lms.disable())"
_RESERVE_BYTES = 512 << 20  # what a limit of None leaves free, or a sixteenth of the device where that is less


class Device(Protocol):
    """All devices of one kind. Sizes are in bytes and include what is cached."""

    def attach(self, extension: Any) -> None:
        """From now on an allocation that does not fit asks LMS to evict."""

    def release(self, extension: Any) -> None:
        """Lifts the limit, and then the asking: no allocation fails because LMS is switched off meanwhile."""

    def detach(self, extension: Any) -> None:
        """Undoes `attach`, after `release`. Both can be called again, and do what is left then."""

    def held_bytes(self) -> int:
        """Of the fullest device."""

    def peak_bytes(self) -> int:
        """The most since `reset_peaks`, of the fullest device."""

    def reset_peaks(self) -> None:
        """Starts new peaks."""

    def most_bytes(self) -> int:
        """What may be held where no limit is given."""

    def set_limit(self, allowed_bytes: int | None, is_whole: bool = False) -> None:
        """None: no limit of LMS's. is_whole: it is all that the device gives, so torch's own limit stays."""

    def allowed_bytes(self) -> int:
        """The limit that was set, or what the smallest device has."""

    def trim(self) -> None:
        """Gives back what is cached and free as a whole."""

    def is_ordinary(self, tensor: Any) -> bool:
        """Whether its memory is what a program gets from torch while LMS is on, and no tag of its own."""

    def ordinary(self) -> AbstractContextManager[Any]:
        """What is allocated in here is such memory, also inside a region."""

    def optional(self, make: Callable[[], _T]) -> _T:
        """What `make` allocates is such memory, too. It is never on the host: without room, an OutOfMemoryError."""

    def making(self, trims: bool = True) -> AbstractContextManager[Any]:
        """Around a region of LMS's, in which memory that the limit has no room for lies on the host.

        trims: with all the room that there can be, which waits for the device.
        """


class SimulatedDevice:
    """CPU tensors. A region for all threads takes them, and ebbtide's own limit holds."""

    def __init__(self) -> None:
        self._frame: _core.Frame | None = None

    def attach(self, extension: Any) -> None:
        allocator = torch_extension.load()
        self._frame = _core.Frame()  # noted first, so that an interrupt leaves nothing that `detach` does not end
        policy = entry.RegionPolicy(TAG, backup_code("ram"), False)
        entry.prepare_region(self._frame, policy, takes_all_threads=True, holder=_HOLDER)
        self._frame.activate()  # of no thread: the one that enables LMS may end
        _core.reenter()  # a region that is open keeps what is made in it
        open_pools = [pool for pool in registry.pools(TAG) if pool.is_leased]
        allocator.set_pool_apart(open_pools[0].handle)
        extension.set_hooks(*allocator.lms_functions())
        allocator.set_reclaimer(*extension.reclaim_functions())

    def release(self, extension: Any) -> None:
        _core.set_lms_limit(_core.UNLIMITED)
        torch_extension.load().set_reclaimer(0, 0, 0, 0)

    def detach(self, extension: Any) -> None:
        allocator = torch_extension.load()
        if self._frame is not None:
            self._frame.close()
        allocator.set_pool_apart(0)
        self.trim()
        self._frame = None

    def held_bytes(self) -> int:
        return max(_core.query_device(number).held_bytes for number in range(_core.device_count()))

    def peak_bytes(self) -> int:
        return max(_core.query_device(number).peak_bytes for number in range(_core.device_count()))

    def reset_peaks(self) -> None:
        _core.reset_peaks()

    def most_bytes(self) -> int:
        total = _core.query_device(0).total_bytes
        return total - min(_RESERVE_BYTES, total // 16)

    def set_limit(self, allowed_bytes: int | None, is_whole: bool = False) -> None:
        _core.set_lms_limit(_core.UNLIMITED if allowed_bytes is None else allowed_bytes)

    def allowed_bytes(self) -> int:
        info = _core.query_device(0)
        return min(info.limit_bytes, info.total_bytes)

    def trim(self) -> None:
        extension = torch_extension.load()
        for pool in registry.pools(TAG):
            extension.pool_trim(pool.handle)

    def is_ordinary(self, tensor: Any) -> bool:
        found = _core.find(tensor.untyped_storage().data_ptr())
        return found is not None and found.tag in (TAG, OVERFLOW_TAG)

    def ordinary(self) -> AbstractContextManager[Any]:
        return region(TAG)

    def optional(self, make: Callable[[], _T]) -> _T:
        return _without_overflow(self.ordinary(), make)

    def making(self, trims: bool = True) -> AbstractContextManager[Any]:
        return nullcontext()


class CudaDevice:
    """GPUs. The memory is what torch's caching allocator hands out. Two limits hold together (`balance`): torch's, for
    what it reserves, and ebbtide's, for the tags among that.

    Only devices that have a context are limited: a limit on another one would make one there.
    """

    def __init__(self) -> None:
        self._fractions: dict[int, float] = {}  # by device: torch's limit before LMS, as a part of the device
        self._allowed: int | None = None
        self._is_whole = False
        self._peak_bytes = 0
        self._was_away = False  # memory of a tag, since `reset_peaks`
        self._makings: weakref.WeakSet[_Making] = weakref.WeakSet()
        self._lock = make_lock()  # one `balance` at a time

    def attach(self, extension: Any) -> None:
        extension.follow_cuda(self.balance, self.give_back)
        _core.leave_torch_to_lms(True)
        after_resumes.append(self.balance)
        expandable_segments.prefer()

    def release(self, extension: Any) -> None:
        self.set_limit(None)
        if self.balance in after_resumes:
            after_resumes.remove(self.balance)
        extension.leave_cuda()
        _core.leave_torch_to_lms(False)

    def detach(self, extension: Any) -> None:
        expandable_segments.prefer_no_more()
        self.trim()

    def held_bytes(self) -> int:
        return max(memory.held_bytes for memory in memories().values())

    def peak_bytes(self) -> int:
        import torch

        # torch's own peak has what tags have on the host, too. Where they had any, it is at least what `balance` saw.
        most = 0 if self._was_away else max(torch.cuda.max_memory_reserved(device) for device in used_devices())
        return max(self._peak_bytes, self.held_bytes(), most)

    def reset_peaks(self) -> None:
        import torch

        self._peak_bytes = 0
        self._was_away = False
        for device in used_devices():
            torch.cuda.reset_peak_memory_stats(device)

    def most_bytes(self) -> int:
        import torch

        room = []
        for device, memory in memories().items():
            free, total = torch.cuda.mem_get_info(device)
            room.append(free + memory.held_bytes - min(_RESERVE_BYTES, total // 16))
        return max(0, min(room))

    def set_limit(self, allowed_bytes: int | None, is_whole: bool = False) -> None:
        self._allowed, self._is_whole = allowed_bytes, is_whole
        if allowed_bytes is not None and not is_whole:
            self.balance()
            return
        with self._lock:  # a `balance` that is under way would set the limit again
            self._lift(allowed_bytes)

    def _lift(self, allowed_bytes: int | None) -> None:
        extension = torch_extension.load("_lms")
        _core.set_lms_limit(_core.UNLIMITED)
        for device, memory in memories().items():
            if device in self._fractions:
                limit_torch(device, self._fractions.pop(device))
            extension.set_cuda_limit(device, memory.total_bytes if allowed_bytes is None else allowed_bytes)
            extension.set_cuda_away(device, memory.away_bytes, memory.unused_bytes, _WATCHES_NOTHING)

    def allowed_bytes(self) -> int:
        if self._allowed is not None:
            return self._allowed
        return min(_core.query_device(device).total_bytes for device in used_devices())

    def balance(self) -> bool:
        """What torch counts of a tag does not change where the memory goes to the host, so torch may reserve that much
        more than the limit; and the tags may have on the device what the rest leaves. Both follow what moved since.

        Returns:
            Whether torch may reserve more than before.
        """
        with self._lock:
            return self._balance()

    def _balance(self) -> bool:
        allowed, rooms, has_risen = self._allowed, [], False
        if allowed is not None and expandable_segments.are_preferred():
            allowed -= min(expandable_segments.PAGE_BYTES, allowed // 16)  # by which torch may exceed its limit
        extension = torch_extension.load("_lms")
        for device, memory in memories().items():
            self._peak_bytes = max(self._peak_bytes, memory.held_bytes)
            self._was_away |= memory.away_bytes > 0
            if allowed is None or self._is_whole:
                extension.set_cuda_away(device, memory.away_bytes, memory.unused_bytes, _WATCHES_NOTHING)
                extension.set_cuda_limit(device, allowed or memory.total_bytes)
                continue
            extension.set_cuda_limit(device, allowed)
            before = self._fractions.setdefault(device, limit_of_torch(device))
            fraction = (allowed + memory.away_bytes) / memory.total_bytes
            watch = _WATCHES_ALL if fraction >= 1 else _WATCHES_FLUSHES if _may_go_in_a_flush() else _WATCHES_NOTHING
            if before < 1 and fraction > before:
                watch = _WATCHES_NOTHING  # the program's own limit is lower
            if len(self._makings) > 0:
                fraction, watch = before, _WATCHES_ALL
            fraction = min(fraction, before)
            extension.set_cuda_away(device, memory.away_bytes, memory.unused_bytes, watch)
            has_risen |= fraction > limit_of_torch(device)
            limit_torch(device, fraction)
            rooms.append(max(0, allowed - memory.ordinary_bytes))
        if rooms:
            _core.set_lms_limit(min(rooms))
        return has_risen

    def trim(self) -> None:
        import torch

        if not captures.is_capturing():
            with disabled():  # while a pool is open, torch empties that one only
                torch.cuda.empty_cache()
        self.balance()

    def give_back(self) -> bool:
        """What is cached, where more is held than the limit. False: a graph is captured, or the device is the limit."""
        if self._is_whole or captures.is_capturing():
            return False
        self.trim()
        return True

    def is_ordinary(self, tensor: Any) -> bool:
        if not tensor.is_cuda:
            return False
        found = _core.find(tensor.untyped_storage().data_ptr())
        return found is None or found.tag == OVERFLOW_TAG

    def ordinary(self) -> AbstractContextManager[Any]:
        return disabled()

    def optional(self, make: Callable[[], _T]) -> _T:
        return _without_overflow(self.ordinary(), make)

    def making(self, trims: bool = True) -> AbstractContextManager[Any]:
        return _Making(self, self._makings, trims)


def _may_go_in_a_flush() -> bool:
    """Memory on the host: that of a dissolved pool that overflows."""
    return any(key.overflow != NO_OVERFLOW_CODE for key, _ in registry.dissolved())


def _without_overflow(ordinary: AbstractContextManager[Any], make: Callable[[], _T]) -> _T:
    with ordinary:
        made: _T = torch_extension.load("_lms").without_overflow(make)
        return made


class _Making:
    """Torch's limit is lifted while it lives, and entered: ebbtide's decides what lies on the host."""

    def __init__(self, device: CudaDevice, makings: "weakref.WeakSet[_Making]", trims: bool) -> None:
        self._device, self._makings, self._trims = device, makings, trims

    def __enter__(self) -> None:
        self._makings.add(self)
        if self._trims:
            self._device.trim()
        else:
            self._device.balance()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._makings.discard(self)
        self._device.balance()


# --- the last resort ---


def take_overflow(device: Device, extension: Any, size_bytes: int) -> Any:
    """Memory for an allocation that finds no room, though nothing can leave any more: a tensor of so many bytes in a
    tag of its own, on the host as far as the device has no room. None: a region of the program takes what this thread
    allocates, a graph is captured, or the host has no room either.
    """
    import torch

    backend = startup.backend()
    if backend is None or captures.is_capturing() or _core.thread_policy()[0] == _IN_REGION:
        return None
    extension.note_overflow("")
    try:
        with device.making(trims=False), region(OVERFLOW_TAG, overflow="split"):
            taken = torch.empty(size_bytes, dtype=torch.uint8, device=backend.device_type)
    except torch.OutOfMemoryError:
        extension.note_overflow("and the host has no room for it either, within host_limit")
        return None
    _overflow.most_bytes = max(overflow_bytes())
    return taken


def overflow_bytes() -> tuple[int, int]:
    """Of what `take_overflow` gave: on the host now, and the most since `forget_overflow`."""
    info = _core.query_tag(OVERFLOW_TAG)
    now = 0 if info is None else info.host_bytes
    return now, max(now, _overflow.most_bytes)


def release_dead_overflow() -> None:
    """What no tensor uses any more would keep its part of the device."""
    info = _core.query_tag(OVERFLOW_TAG)
    if info is not None and info.resident_bytes:
        with contextlib.suppress(Error):  # a capture, or a thread that takes some now
            trim(OVERFLOW_TAG)


def forget_overflow() -> None:
    """Starts a new peak."""
    _overflow.most_bytes = 0


class _Overflow:
    most_bytes = 0  # at once on the host


_overflow = _Overflow()
