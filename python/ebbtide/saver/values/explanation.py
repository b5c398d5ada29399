"""The result of `saver.explain`: why the last pause of a tag copied what it copied."""

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
        name: what leads to them ("MLP.fc.weight"), or their kind and shape where nothing does.
        bytes: what the storage has in blocks that were copied.
        changed: the part of it in blocks that differed from the copy of an earlier pause.
        address: the storage's first byte.
    """

    name: str
    bytes: int
    changed: int
    address: int


@dataclass(frozen=True)
class Explanation(Shown):
    """What the last pause with a backup did about each block of 2 MiB of a tag. Sizes are bytes.

        print(saver.explain("weights").changed)

    Attributes:
        tag: the tag.
        changed: blocks that were copied because they differed from the copy of an earlier pause.
        copied: blocks that were copied because no earlier copy of them was known, or because they had changed before
            each of the two pauses before, this time without having changed.
        clean, unused, constant: blocks that were not copied, as in a Report.
        blocks: (address, bytes, "changed" or "copied") of what was copied, in the order of addresses.
        tensors: what lies in those blocks, most bytes first. One changed byte makes its whole block move, so of the
            tensors that share a changed block only one need have changed.
        unnamed: bytes of those blocks in which no Python object shows a tensor.
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

    def __str__(self) -> str:
        if not (self.changed or self.copied or self.clean or self.unused or self.constant):
            return f"{self.tag}: not paused with a backup yet"
        skipped = {"unchanged": self.clean, "unused": self.unused, "constant": self.constant}
        left_out = ", ".join(f"{format_size(size)} {reason}" for reason, size in skipped.items() if size)
        lines = [
            f"{self.tag}: the last pause copied {format_size(self.changed + self.copied)}"
            + (f" and left out {left_out}" if left_out else "")
        ]
        if self.changed:
            lines.append(f"  {format_size(self.changed)} had changed since they were last copied{self._sharing()}")
        if self.copied:
            lines.append(
                f"  {format_size(self.copied)} had no earlier copy: it was the first pause, the backup was not kept "
                "(saver.region(retain=True) keeps it), it was of another kind (backup=), somebody looked at it "
                "(saver.backup_of), or there was no memory for tables (then the report's note says so)"
            )
        for tensor in self.tensors[:_SHOWN]:
            changed = f", {format_size(tensor.changed)} in changed blocks" if tensor.changed else ""
            lines.append(f"  {format_size(tensor.bytes)} of {tensor.name}{changed}")
        if len(self.tensors) > _SHOWN:
            rest = sum(tensor.bytes for tensor in self.tensors[_SHOWN:])
            lines.append(f"  {format_size(rest)} of {len(self.tensors) - _SHOWN} more tensors")
        if self.unnamed:
            lines.append(f"  {format_size(self.unnamed)} that no tensor of Python shows, or that is free")
        return "\n".join(lines)

    def _sharing(self) -> str:
        """What to think of tensors that changed blocks have in common."""
        sharing = sum(1 for tensor in self.tensors if tensor.changed)
        count = self.changed // _BLOCK_BYTES
        if sharing <= count:
            return ""
        blocks = "a block" if count == 1 else f"{count} blocks"
        return (
            f": {blocks} of {format_size(_BLOCK_BYTES)}, with {sharing} tensors. One changed byte moves its block, so "
            "most of them need not have changed. Give what changes often a region of its own"
        )
