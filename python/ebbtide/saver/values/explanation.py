"""The result of `saver.explain`: why the last pause of a tag copied its blocks."""

from dataclasses import dataclass

from ebbtide.saver.values.shown import Shown
from ebbtide.sizes import format_size

_SHOWN = 10
_BLOCK_BYTES = 2 << 20  # csrc/kernels/block_types.h


@dataclass(frozen=True)
class CopiedTensor(Shown):
    """Tensors that share one storage, of which the pause copied blocks.

        print([tensor.name for tensor in saver.explain("weights").tensors])

    Attributes:
        name: the path to them ("MLP.fc.weight"), or their kind and shape where nothing does.
        bytes: the storage's bytes in copied blocks.
        changed: the part of it in blocks that differed from the copy of an earlier pause.
        address: the storage's first byte.
    """

    name: str
    bytes: int
    changed: int
    address: int


@dataclass(frozen=True)
class Explanation(Shown):
    """The decisions of the last pause about each block of 2 MiB of a tag. Sizes are bytes.

        print(saver.explain("weights").changed)

    Attributes:
        tag: the tag.
        changed: blocks that were copied because they differed from the copy of an earlier pause.
        copied: blocks that were copied although they are not known to have changed: no earlier copy of them was kept,
            or they were not compared with it.
        clean, unused, constant: blocks that were not copied, as in a Report.
        blocks: (address, bytes, "changed" or "copied") of the copied ranges, in the order of addresses.
        tensors: the present tensors in those blocks, most bytes first: after a resume also one that was made since, in
            memory that was free. One changed byte makes its whole block move, so of the tensors that share a changed
            block only one need have changed.
        unnamed: bytes of those blocks in which no Python object shows a tensor.
        uncompared: the part of `copied` of which there was an earlier copy.
        dropped: blocks that the pause took away without a backup.
        on_host: blocks in host memory, which stayed there.
        was_paused: whether a pause ever took memory of the tag.
    """

    tag: str
    changed: int
    copied: int
    clean: int
    unused: int
    constant: int
    blocks: tuple[tuple[int, int, str], ...]
    tensors: tuple[CopiedTensor, ...]
    unnamed: int
    uncompared: int = 0
    dropped: int = 0
    on_host: int = 0
    was_paused: bool = False

    def __str__(self) -> str:
        skipped = {
            "unchanged": self.clean,
            "unused": self.unused,
            "constant": self.constant,
            "dropped without a backup": self.dropped,
            "on the host": self.on_host,
        }
        if not (self.changed or self.copied or any(skipped.values())):
            gone = "nothing is left of the last pause's memory: it was freed, or given back by a trim"
            return f"{self.tag}: {gone if self.was_paused else 'not paused yet'}"
        left_out = ", ".join(f"{format_size(size)} {reason}" for reason, size in skipped.items() if size)
        lines = [
            f"{self.tag}: the last pause copied {format_size(self.changed + self.copied)}"
            + (f" and left out {left_out}" if left_out else "")
        ]
        if self.changed:
            lines.append(f"  {format_size(self.changed)} had changed since they were last stored{self._sharing()}")
        if unknown := self.copied - self.uncompared:
            lines.append(
                f"  {format_size(unknown)} had no earlier copy: it is new in the tag, at the pause before it was not "
                "in use or lay on the host, the backup was not kept (saver.region(retain=True) keeps it, "
                "resume(retain=False) does not), it was of another kind (backup=) or made with skip_clean off, or "
                "there was a view of it (saver.backup_of)"
            )
        if self.uncompared:
            lines.append(
                f"  {format_size(self.uncompared)} had an earlier copy, and may not have changed: skip_clean was off, "
                "there was no memory for tables (then the report's note says so), or it had changed before each of "
                "the two pauses before"
            )
        if self.tensors:
            lines.append("  in these blocks now:")
        for tensor in self.tensors[:_SHOWN]:
            changed = f", {format_size(tensor.changed)} in changed blocks" if tensor.changed else ""
            lines.append(f"    {format_size(tensor.bytes)} of {tensor.name}{changed}")
        if len(self.tensors) > _SHOWN:
            rest = sum(tensor.bytes for tensor in self.tensors[_SHOWN:])
            lines.append(f"    {format_size(rest)} of {len(self.tensors) - _SHOWN} more tensors")
        if self.unnamed:
            lines.append(f"  {format_size(self.unnamed)} that no tensor of Python shows, or that is free")
        return "\n".join(lines)

    def _sharing(self) -> str:
        """A note on tensors that share changed blocks."""
        sharing = sum(1 for tensor in self.tensors if tensor.changed)
        count = self.changed // _BLOCK_BYTES
        if sharing <= count:
            return ""
        blocks = "a block" if count == 1 else f"{count} blocks"
        return (
            f": {blocks} of {format_size(_BLOCK_BYTES)}, with {sharing} tensors. One changed byte moves its block, so "
            "most of them need not have changed. Give tensors that change often a region of their own"
        )
