"""Pools of the simulated device: CPU memory that torch's CPU allocator hands out, cut into blocks by `_torch`."""

from collections.abc import Sequence
from typing import Any

from ebbtide import _core, torch_extension
from ebbtide.saver.pools.backends import PoolUse, Separation
from ebbtide.saver.values.segments import Segment, make_segment
from ebbtide.saver.values.survivors import UsedBlock


class CpuPools:
    """`PoolBackend` over `_torch`. A pool is a number of the extension and never dies."""

    device_type = "cpu"
    inner_beats_all = True
    one_thread_only = False
    flushes_first = True

    def __init__(self, extension: Any) -> None:
        self._extension = extension

    def devices(self) -> Sequence[int]:
        """The first simulated device, since CPU tensors have no ordinal."""
        return (0,)

    def make(self, slot: int, device: int, tag: str) -> int:
        """See PoolBackend."""
        return int(self._extension.pool_create(slot, tag))

    def segments_of(self, pools: Sequence[int]) -> Sequence[Sequence[Segment] | None]:
        """See PoolBackend."""
        return [
            [
                make_segment(
                    address, size, [(address + start, length, not is_used) for start, length, is_used in blocks]
                )
                for address, size, blocks in self._extension.pool_snapshot(pool)
            ]
            for pool in pools
        ]

    def used_blocks(self, pools: Sequence[int]) -> Sequence[UsedBlock]:
        """See PoolBackend. torch does not record where a block was made."""
        return [
            UsedBlock(address + offset, length)
            for pool in pools
            for address, _, blocks in self._extension.pool_snapshot(pool)
            for offset, length, is_used in blocks
            if is_used
        ]

    def dissolve(self, pool: int) -> bool:
        """See PoolBackend."""
        return True

    def give_back(self, dissolved: Sequence[int]) -> None:
        """See PoolBackend."""
        for pool in dissolved:
            self._extension.pool_trim(pool)

    def uses(self, pool: int, takes_all_threads: bool) -> Sequence[PoolUse]:
        """See PoolBackend."""
        return (PoolUse(self._extension.pool_enter, (pool, takes_all_threads), (self._extension.pool_leave,)),)

    def suspension(self) -> Sequence[PoolUse]:
        """See PoolBackend. Pools that other threads opened for all are left as well."""
        return (PoolUse(self._extension.pool_suspend, (), (self._extension.pool_restore,), True),)

    def separate(self) -> Separation:
        """See PoolBackend. torch caches no CPU memory."""
        return Separation(self.suspension(), ())


def make_backend() -> CpuPools:
    """Loads `_torch` (builds it at first need) and installs its allocator in front of torch's.

    Raises:
        DriverError: the simulated device does not start.
    """
    _core.query_device(0)  # raises the reason here; in an allocation it would look like out of memory
    extension = torch_extension.load()
    extension.install()
    return CpuPools(extension)
