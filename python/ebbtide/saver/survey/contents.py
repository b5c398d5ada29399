"""The memory in a tag: `saver.survivors`, and why the last pause copied it: `saver.explain`."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ebbtide import _core, driver_choice
from ebbtide.saver.pools import backends, region_pools
from ebbtide.saver.state.known_tags import check_known
from ebbtide.saver.tensors import living
from ebbtide.saver.values.arguments import check_tag
from ebbtide.saver.values.explanation import CopiedTensor, Explanation
from ebbtide.saver.values.survivors import Survivor, Survivors, UsedBlock

if TYPE_CHECKING:
    import torch

Block = tuple[int, int, str]  # address, bytes, verdict
_COPIED = ("changed", "copied", "uncompared")
_FIELDS = ("changed", "clean", "unused", "constant", "uncompared", "dropped", "on_host")  # by verdict


def explain(tag: str) -> Explanation:
    """Why the last pause of `tag` copied as much as it did, and which tensors lie in the copied blocks.

        saver.pause("weights")
        print(saver.explain("weights"))

    It may be asked while the tag is paused and until it is paused again. Memory that was away already when the tag was
    last paused counts as in the pause that took it away. Memory that has died or was trimmed since is not listed. The
    names are those of the present tensors in the blocks: ask before the resume, after which a tensor may be made in
    memory that another has left. It looks at every object of the process, which takes some tenths of a second for each
    million of them, and costs nothing where it is not asked.

    Returns:
        An Explanation. All its numbers are 0 if the tag was never paused.

    Raises:
        TypeError, ValueError: not a tag.
        StateError: no region ever named it.
    """
    check_tag(tag)
    if driver_choice.is_off():
        return Explanation(tag, 0, 0, 0, 0, 0, (), (), 0)
    check_known([tag])
    blocks = [
        (address, size_bytes, verdict)
        for info in sorted(_core.allocations(tag), key=lambda info: info.address)
        for address, size_bytes, _, verdict in _core.stretches(info.address, info.size_bytes)
    ]
    sums: Counter[str] = Counter()
    for _, size_bytes, verdict in blocks:
        sums[verdict] += size_bytes
    copied = [
        (address, size_bytes, "changed" if verdict == "changed" else "copied")
        for address, size_bytes, verdict in blocks
        if verdict in _COPIED
    ]
    tensors = _tensors_in(copied)
    return Explanation(
        tag,
        **{verdict: sums[verdict] for verdict in _FIELDS},
        copied=sums["copied"] + sums["uncompared"],
        blocks=tuple(copied),
        tensors=tuple(sorted(tensors, key=lambda tensor: (-tensor.bytes, tensor.address))),
        unnamed=max(sum(size for _, size, _ in copied) - sum(tensor.bytes for tensor in tensors), 0),
        was_paused=_core.pause_count(tag) > 0,
    )


def _tensors_in(blocks: Sequence[Block]) -> list[CopiedTensor]:
    """The storages that have bytes in these blocks, which are in the order of addresses."""
    if not blocks:
        return []
    shares: dict[int, Counter[str]] = {}

    def has_share(address: int, size_bytes: int) -> bool:
        if address not in shares:
            shares[address] = _share(blocks, address, size_bytes)
        return shares[address].total() > 0

    groups, holders = living.storages(has_share, globals())
    return [
        CopiedTensor(_name(group, holders), shares[address].total(), shares[address]["changed"], address)
        for address, group in groups.items()
    ]


def _share(blocks: Sequence[Block], address: int, size_bytes: int) -> "Counter[str]":
    """The bytes of a range in these blocks, by verdict."""
    share: Counter[str] = Counter()
    end = address + size_bytes
    index = max(bisect_right(blocks, address, key=lambda block: block[0]) - 1, 0)
    while index < len(blocks) and blocks[index][0] < end:
        first, length, verdict = blocks[index]
        share[verdict] += max(min(first + length, end) - max(first, address), 0)
        index += 1
    return share


def _name(group: "Sequence[torch.Tensor]", holders: living.Holders) -> str:
    tensor = max(group, key=living.count_of)
    return holders.name_of(tensor, *group) or living.describe(tensor)


def survivors(tag: str) -> Survivors:
    """The memory still in `tag`, paused or not: for the question why it does not become less.

        print(saver.survivors("weights"))

    Each row is a storage with the tensors that use it, or a block that no Python object shows: memory that a graph
    saved for backward, a library's workspace, a result of a captured graph. The rows keep nothing alive.

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
