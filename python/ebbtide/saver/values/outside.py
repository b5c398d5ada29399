"""The result of `saver.outside`: the tensors of some objects that lie outside of tags, as plain values."""

import html
from collections.abc import Iterator
from dataclasses import dataclass, field

from ebbtide.saver.values.shown import Shown, html_table, not_looked_into, text_table
from ebbtide.sizes import format_size

_SHOWN = 10
_PLURALS = {"parameter": "parameters", "buffer": "buffers", "gradient": "gradients", "state": "optimizer states"}


def sum_up(by_kind: dict[str, int]) -> str:
    """ "64.0 MiB of gradients, 128.0 MiB of optimizer states"."""
    return ", ".join(f"{format_size(size)} of {_PLURALS.get(kind, 'tensors')}" for kind, size in by_kind.items())


@dataclass(frozen=True)
class OutsideTensor(Shown):
    """A storage that lies outside.

    For example:

        print([row.name for row in saver.outside(model, optimizer).rows])

    Attributes:
        name: the path to it ("MLP.fc.weight", "the gradient of MLP.fc.weight", "AdamW exp_avg of MLP.fc.weight"), or
            its kind and shape where nothing does.
        kind: "parameter", "buffer", "gradient", "state" (of an optimizer) or "tensor".
        bytes: the size of the storage.
        device: the device's ordinal.
        tag: the other tag that it lies in; None where it lies in none.
        address: the storage's first byte.
    """

    name: str
    kind: str
    bytes: int
    device: int
    tag: str | None
    address: int


@dataclass(frozen=True)
class Outside(Shown):
    """The memory outside a tag, or outside every tag: a sequence of `rows`, false if there is none. Sizes are bytes.

    For example:

        print(saver.outside(model, optimizer).by_kind)

    Attributes:
        tag: the tag that was asked for; None for every tag.
        bytes: memory outside. Tensors that share a storage count once.
        inside: memory in the tag, or in any tag.
        by_kind: `bytes`, by the kind of tensor.
        rows: the storages outside, the largest first.
        passed_by: objects in a container that may hold tensors and were not looked into, as in an Adoption.
    """

    tag: str | None
    bytes: int = 0
    inside: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    rows: tuple[OutsideTensor, ...] = ()
    passed_by: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[OutsideTensor]:
        return iter(self.rows)

    def __str__(self) -> str:
        total = format_size(self.bytes + self.inside)
        passed = [f"  {not_looked_into(self.passed_by)}"] if self.passed_by else []
        if not self.rows:
            inside = f"all {total} lie in {'tags' if self.tag is None else f'tag {self.tag}'}"
            return "\n".join([inside if self.inside else "no device memory of a tensor was found", *passed])
        where = "in no tag" if self.tag is None else f"outside of tag {self.tag}"
        lines = [f"{format_size(self.bytes)} of {total} lie {where}: {sum_up(self.by_kind)}"]
        lines += [f"  {line}" for line in text_table(self._table())]
        if rest := self.rows[_SHOWN:]:
            lines.append(f"  and {format_size(sum(row.bytes for row in rest))} in {len(rest)} more")
        return "\n".join([*lines, *passed, self._advice()])

    def _repr_html_(self) -> str:
        if not self.rows:
            return super()._repr_html_()
        passed = f"<p>{html.escape(not_looked_into(self.passed_by))}</p>" if self.passed_by else ""
        return html_table(self._table(len(self.rows))) + passed

    def _table(self, count: int = _SHOWN) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("size", "kind", "tag", "name")]
        return rows + [(format_size(row.bytes), row.kind, row.tag or "-", row.name) for row in self.rows[:count]]

    def _advice(self) -> str:
        tag = "..." if self.tag is None else repr(self.tag)
        return f"make them in the tag's region, or move them with saver.adopt(*objects, tag={tag})"
