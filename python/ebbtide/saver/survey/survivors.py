"""`saver.survivors`: the tensors that live in a tag, what leads to them, and where they were made."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ebbtide import _core, driver_choice
from ebbtide.saver.pools import backends, region_pools
from ebbtide.saver.state.known_tags import check_known
from ebbtide.saver.tensors import living
from ebbtide.saver.values.arguments import check_tag
from ebbtide.saver.values.survivors import Survivor, Survivors, UsedBlock

if TYPE_CHECKING:
    import torch


def survivors(tag: str) -> Survivors:
    """What still lies in `tag`, paused or not: for the question why its memory does not become less.

        print(saver.survivors("weights"))

    Each row is a storage with the tensors that use it, or a block that no Python object shows: what a graph saved for
    backward, a library's workspace, a result of a captured graph. The rows keep nothing alive.

    Looks at every object of the process, which takes about a second for each million of them.

    Returns:
        The Survivors, the largest first. `made_at` needs a GPU, and that
        `torch.cuda.memory._record_memory_history()` was called before the memory was allocated. On the simulated
        device it is empty.

    Raises:
        TypeError, ValueError: not a tag.
        StateError: no region ever named it.
    """
    check_tag(tag)
    if driver_choice.is_off():
        return Survivors()
    check_known([tag])
    places = _Places(tag)
    groups, holders = living.storages(lambda address, _: places.device_of(address) is not None, globals())
    rows = [_describe(group, address, holders, places) for address, group in groups.items()]
    rows += [_describe_block(block, places) for block in places.blocks_without(groups)]
    return Survivors(sorted(rows, key=lambda row: (-row.bytes, row.address)))


class _Places:
    """The allocations of a tag, and torch's blocks in them that are in use."""

    def __init__(self, tag: str) -> None:
        self._allocations = sorted((info.address, info.size_bytes, info.device) for info in _core.allocations(tag))
        backend = backends.existing_backend()
        pools = [pool.handle for pool in region_pools.registry.pools(tag)]
        pools += [pool.handle for _, pool in region_pools.registry.dissolved([tag])]
        blocks: Iterable[UsedBlock] = () if backend is None else backend.used_blocks(pools)
        self._blocks = sorted(block for block in blocks if self.device_of(block.address) is not None)
        self._starts = [block.address for block in self._blocks]

    def device_of(self, address: int) -> int | None:
        """The device of the tag's allocation that has this address; None where it is none of the tag's."""
        index = bisect_right(self._allocations, (address, 2**64, 0)) - 1
        if index < 0:
            return None
        start, size_bytes, device = self._allocations[index]
        return device if address < start + size_bytes else None

    def block_of(self, address: int) -> UsedBlock | None:
        """The block that this address lies in."""
        index = bisect_right(self._starts, address) - 1
        block = self._blocks[index] if index >= 0 else None
        return block if block is not None and address < block.address + block.size_bytes else None

    def blocks_without(self, addresses: Iterable[int]) -> list[UsedBlock]:
        """The blocks that none of these addresses lies in."""
        shown = {block.address for block in map(self.block_of, addresses) if block is not None}
        return [block for block in self._blocks if block.address not in shown]


def _describe_block(block: UsedBlock, places: _Places) -> Survivor:
    device = places.device_of(block.address) or 0
    return Survivor(block.size_bytes, "", (), "", 0, "", "", block.frames, device, block.address)


def _describe(group: "Sequence[torch.Tensor]", address: int, holders: living.Holders, places: _Places) -> Survivor:
    tensor = max(group, key=lambda each: (living.count_of(each), bool(holders.name_of(each))))
    block, memory = places.block_of(address), living.storage_range(tensor)
    return Survivor(
        bytes=memory[1] if memory is not None else 0,
        kind=type(tensor).__name__,
        shape=living.shape_of(tensor),
        dtype=living.dtype_of(tensor),
        views=len(group) - 1,
        held_by=holders.name_of(tensor, *group),
        made_by=living.maker_of(tensor),
        made_at=() if block is None else block.frames,
        device=places.device_of(address) or 0,
        address=address,
        is_registered=any(map(holders.is_registered, group)),
    )
