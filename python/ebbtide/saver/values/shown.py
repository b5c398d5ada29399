"""The forms of every result beside its `str`: a dictionary, JSON, and HTML for notebooks."""

import dataclasses
import html
import json
from typing import Any

_MOST_PASSED_BY = 8


class Shown:
    """The base of results: dataclasses, and collections of them, with a readable `str`."""

    def to_dict(self) -> Any:
        """The fields as plain dictionaries, lists, strings and numbers."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {each.name: _plain(getattr(self, each.name)) for each in fields}

    def to_json(self) -> str:
        """`to_dict` as JSON. Keys that are numbers become strings."""
        return json.dumps(self.to_dict())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _plain(value: Any) -> Any:
    if isinstance(value, Shown):
        return value.to_dict()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def not_looked_into(passed_by: dict[str, str]) -> str:
    """ "not looked into: trainer (Trainer), rows.1 (partial)", of paths and types; "" for none."""
    if not passed_by:
        return ""
    shown = [f"{path} ({kind})" for path, kind in list(passed_by.items())[:_MOST_PASSED_BY]]
    left = len(passed_by) - len(shown)
    return f"not looked into: {', '.join(shown)}" + (f" and {left} more" if left else "")


def text_table(rows: list[tuple[str, ...]]) -> list[str]:
    """The lines of a table; the first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def html_table(rows: list[tuple[str, ...]]) -> str:
    """An HTML table; the first row is its head."""

    def line(cells: tuple[str, ...], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"

    return "<table>" + line(rows[0], "th") + "".join(line(row, "td") for row in rows[1:]) + "</table>"
