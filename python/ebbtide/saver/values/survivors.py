"""The result of `saver.survivors`: the memory still in a tag, as plain values that keep nothing alive."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ebbtide.saver.values.shown import Shown, html_table
from ebbtide.sizes import format_size

_SHOWN_FRAMES = 3


class UsedBlock(NamedTuple):
    """A block of torch's that is in use. `frames`: where it was made, the innermost first; empty where unknown."""

    address: int
    size_bytes: int
    frames: tuple[str, ...] = ()


@dataclass(frozen=True)
class Survivor(Shown):
    """Memory of a tag that is in use: the tensors that share one storage, or a block that no Python object shows.

        print([row.bytes for row in saver.survivors("weights")])

    Attributes:
        bytes: its storage's bytes in the tag, or the size of the block.
        kind: the type of the tensor ("Parameter"), and "" for a block.
        shape, dtype: of the tensor; of the largest one, where several share the storage. () and "" for a block; () for
            a nested tensor too, whose sizes may be away as well.
        views: how many more tensors share the storage.
        held_by: a name that leads to it: "MLP.fc.weight", "Adam exp_avg of MLP.fc.weight", "x in train (train.py:7)",
            "a list"; "" where there is none.
        made_by: the autograd function that made it ("MulBackward0"), and "" for a leaf or a block.
        made_at: the lines of Python that allocated it ("train.py:7 in step"), the innermost first, where torch records
            the history of its memory; else empty.
        device: the device's ordinal.
        address: the first byte.
        is_registered: whether it is a parameter of a module, or a buffer of one that has parameters or is part of one
            that has: what loads a model's weights finds it.
    """

    bytes: int
    kind: str
    shape: tuple[int, ...]
    dtype: str
    views: int
    held_by: str
    made_by: str
    made_at: tuple[str, ...]
    device: int
    address: int
    is_registered: bool = False

    @property
    def what(self) -> str:
        """The tensor's kind, shape and dtype, and how many share its storage; or that Python shows none."""
        if not self.kind:
            return "held outside Python's objects"
        return f"{self.kind}{list(self.shape)} {self.dtype}" + (f", {self.views} more views" if self.views else "")

    def __str__(self) -> str:
        words = [f"{format_size(self.bytes)} at {self.address:#x}: {self.what}"]
        words += [self.held_by] * bool(self.held_by) + [f"made by {self.made_by}"] * bool(self.made_by)
        return "\n    at ".join([", ".join(words), *self.made_at[:_SHOWN_FRAMES]])


class Survivors(Shown, list[Survivor]):
    """Survivors, the largest first; its `str` has a line for each, and their sum.

    For example:

        print(len(saver.survivors("weights")))
    """

    @property
    def bytes(self) -> int:
        """The bytes of all of them."""
        return sum(survivor.bytes for survivor in self)

    @property
    def unregistered(self) -> "Survivors":
        """The tensors among them that are neither parameters nor buffers of a model: nothing that loads a model's
        weights makes them again."""
        return Survivors(row for row in self if row.kind and not row.is_registered)

    def names(self, most: int = 5) -> str:
        """The paths to the largest of them, with their sizes, in a line."""
        named = [f"{row.held_by or row.what} ({format_size(row.bytes)})" for row in self[:most]]
        return ", ".join([*named, *[f"{len(self) - most} more"] * (len(self) > most)])

    def to_dict(self) -> list[dict[str, Any]]:
        """A dictionary for each."""
        return [survivor.to_dict() for survivor in self]

    def __str__(self) -> str:
        count = "1 survivor" if len(self) == 1 else f"{len(self)} survivors"
        return "\n".join([f"{count}, {format_size(self.bytes)}", *map(str, self)])

    def _repr_html_(self) -> str:
        rows: list[tuple[str, ...]] = [("size", "address", "what", "held by", "made by")]
        rows += [
            (format_size(row.bytes), f"{row.address:#x}", row.what, row.held_by or "-", row.made_by or "-")
            for row in self
        ]
        return html_table(rows)
