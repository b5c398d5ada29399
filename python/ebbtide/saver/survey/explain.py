"""`saver.explain`: why the last pause of a tag copied what it copied."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ebbtide import _core, driver_choice
from ebbtide.saver.state.known_tags import check_known
from ebbtide.saver.tensors import living
from ebbtide.saver.values.arguments import check_tag
from ebbtide.saver.values.explanation import CopiedTensor, Explanation

if TYPE_CHECKING:
    import torch

Block = tuple[int, int, str]  # address, bytes, verdict
_COPIED = ("changed", "copied", "uncompared")
_FIELDS = ("changed", "clean", "unused", "constant", "uncompared", "dropped", "left")  # by verdict


def explain(tag: str) -> Explanation:
    """Why the last pause of `tag` copied as much as it did, and which tensors lie in what it copied.

        saver.pause("weights")
        print(saver.explain("weights"))

    It may be asked while the tag is paused and until it is paused again. What was away already when the tag was last
    paused counts as in the pause that took it away. What has died since is not listed, nor what a trim gave back. The
    names are those of what lies in the blocks now: ask before the resume, after which a tensor may be made in memory
    that another has left. It looks at every object of the process, which takes some tenths of a second for each million
    of them, and costs nothing where it is not asked.

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
