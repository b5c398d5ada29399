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
    """What the last pause did about each block of 2 MiB of a tag. Sizes are bytes.

        print(saver.explain("weights").changed)

    Attributes:
        tag: the tag.
        changed: blocks that were copied because they differed from what an earlier pause kept.
        copied: blocks that were copied although they are not known to have changed: no earlier copy of them was kept,
            or nobody compared them with it.
        clean, unused, constant: blocks that were not copied, as in a Report.
        blocks: (address, bytes, "changed" or "copied") of what was copied, in the order of addresses.
        tensors: what lies in those blocks now, most bytes first: after a resume also a tensor that was made since, in
            memory that was free. One changed byte makes its whole block move, so of the tensors that share a changed
            block only one need have changed.
        unnamed: bytes of those blocks in which no Python object shows a tensor.
        uncompared: the part of `copied` of which there was an earlier copy.
        dropped: what the pause took away without a backup.
        left: what lay in host memory, and stayed there.
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
    left: int = 0
    was_paused: bool = False

    def __str__(self) -> str:
        skipped = {
            "unchanged": self.clean,
            "unused": self.unused,
            "constant": self.constant,
            "dropped without a backup": self.dropped,
            "on the host": self.left,
        }
        if not (self.changed or self.copied or any(skipped.values())):
            gone = "nothing is left of what the last pause took: it was freed, or given back by a trim"
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
                "somebody looked at it (saver.backup_of)"
            )
        if self.uncompared:
            lines.append(
                f"  {format_size(self.uncompared)} had an earlier copy, and may not have changed: skip_clean was off, "
                "compare_bytes was on, there was no memory for tables (then the report's note says so), or it had "
                "changed before each of the two pauses before"
            )
        if self.tensors:
            lines.append("  what lies there now:")
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
