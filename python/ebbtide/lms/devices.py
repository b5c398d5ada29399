"""What large model support needs of a kind of device: whose memory it moves, and how a limit holds."""

from typing import Any, Protocol

from ebbtide import _core, torch_extension
from ebbtide.errors import StateError
from ebbtide.lms.limits import BorrowedLimit
from ebbtide.saver.pools.region_pools import registry
from ebbtide.saver.regions import entry
from ebbtide.saver.values.arguments import backup_code

TAG = "lms"
_RESERVE_BYTES = 512 << 20  # what a limit of None leaves free, or a sixteenth of the device where that is less


class Device(Protocol):
    """All devices of one kind. Sizes are in bytes and include what is cached."""

    def attach(self, extension: Any) -> None:
        """From now on an allocation that does not fit asks LMS to evict."""

    def detach(self, extension: Any) -> None:
        """Undoes `attach`, and the limit. It can be called again, and does what is left then."""

    def held_bytes(self) -> int:
        """Of the fullest device."""

    def peak_bytes(self) -> int:
        """The most since `reset_peaks`, of the fullest device."""

    def reset_peaks(self) -> None:
        """Starts new peaks."""

    def most_bytes(self) -> int:
        """What may be held where no limit is given."""

    def set_limit(self, allowed_bytes: int | None) -> None:
        """None: no limit of LMS's."""

    def trim(self) -> None:
        """Gives back what is cached and free as a whole."""


class SimulatedDevice:
    """CPU tensors. A region for all threads takes them, and ebbtide's own limit holds."""

    def __init__(self) -> None:
        self._frame: _core.Frame | None = None
        self._limit = BorrowedLimit("device")

    def attach(self, extension: Any) -> None:
        allocator = torch_extension.load()
        self._frame = _core.Frame()  # noted first, so that an interrupt leaves nothing that `detach` does not end
        entry.prepare_region(self._frame, entry.RegionPolicy(TAG, backup_code("ram"), False), takes_all_threads=True)
        self._frame.push()
        open_pools = [pool for pool in registry.pools(TAG) if pool.is_leased]
        allocator.set_pool_apart(open_pools[0].handle)
        extension.set_hooks(*allocator.lms_functions())
        allocator.set_reclaimer(*extension.reclaim_functions())

    def detach(self, extension: Any) -> None:
        allocator = torch_extension.load()
        allocator.set_reclaimer(0, 0)
        self._limit.restore()
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

    def set_limit(self, allowed_bytes: int | None) -> None:
        self._limit.set(allowed_bytes)

    def trim(self) -> None:
        extension = torch_extension.load()
        for pool in registry.pools(TAG):
            extension.pool_trim(pool.handle)


class CudaDevice:
    """GPUs. The memory is what torch's caching allocator hands out, and torch's own limit holds.

    Only devices that have a context are limited: a limit on another one would make one there.
    """

    def __init__(self) -> None:
        self._fractions: dict[int, float] = {}  # by device: torch's limit before LMS, as a part of the device

    def attach(self, extension: Any) -> None:
        if not extension.has_cuda():
            raise StateError("large model support on a GPU needs torch 2.11 or newer")
        extension.follow_cuda()

    def detach(self, extension: Any) -> None:
        extension.leave_cuda()
        self.set_limit(None)
        self.trim()

    def held_bytes(self) -> int:
        import torch

        return max(torch.cuda.memory_reserved(device) for device in _devices())

    def peak_bytes(self) -> int:
        import torch

        return max(torch.cuda.max_memory_reserved(device) for device in _devices())

    def reset_peaks(self) -> None:
        import torch

        for device in _devices():
            torch.cuda.reset_peak_memory_stats(device)

    def most_bytes(self) -> int:
        import torch

        room = []
        for device in _devices():
            free, total = torch.cuda.mem_get_info(device)
            room.append(free + torch.cuda.memory_reserved(device) - min(_RESERVE_BYTES, total // 16))
        return max(0, min(room))

    def set_limit(self, allowed_bytes: int | None) -> None:
        import torch

        extension = torch_extension.load("_lms")
        for device in _devices():
            total = torch.cuda.get_device_properties(device).total_memory
            before = self._fractions.setdefault(device, torch.cuda.get_per_process_memory_fraction(device))
            fraction = before if allowed_bytes is None else min(before, allowed_bytes / total)
            torch.cuda.set_per_process_memory_fraction(fraction, device)
            extension.set_cuda_limit(device, int(fraction * total))
            if allowed_bytes is None:
                del self._fractions[device]

    def trim(self) -> None:
        import torch

        torch.cuda.empty_cache()


def _devices() -> list[int]:
    """The GPUs that torch uses in this process."""
    import torch

    torch.cuda.init()
    used = [device for device in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(device)]
    return sorted({*used, torch.cuda.current_device()})
