"""The statistics: one list in csrc/api/ebbtide_queries.h, `saver.stats()` from it, and their table in docs/api.md."""

import re
from pathlib import Path

FIELD = re.compile(r'^  FIELD\((\w+), "([^"]+)"\)', re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)` \| (.+) \|$", re.MULTILINE)


def read_fields(root: Path) -> dict[str, str]:
    """Each field and its meaning, in order."""
    text = (root / "csrc/api/ebbtide_queries.h").read_text()
    fields = FIELD.findall(text)
    assert len(fields) == text.count("\n  FIELD(") > 0, "a line of EBBTIDE_STATS does not read as FIELD(name, meaning)"
    return dict(fields)


def find_differences(page: str, fields: dict[str, str]) -> list[str]:
    """Sentences about rows of the table after `saver.stats` that are not as the list has them."""
    section = page.split("\n### saver.stats\n", 1)[1].split("\n###", 1)[0]
    rows = dict(ROW.findall(section))
    # Python adds this one.
    wanted = {**fields, "pools_made": rows.get("pools_made", "missing")}
    faults = [
        f"{name}: {rows.get(name)!r}, not {meaning!r}" for name, meaning in wanted.items() if rows.get(name) != meaning
    ]
    return faults + [f"{name}: no such field" for name in rows if name not in wanted]


def test_the_page_lists_every_field_with_its_meaning(root: Path) -> None:
    assert find_differences((root / "docs/api.md").read_text(), read_fields(root)) == []


def test_the_dictionary_has_every_field_in_order(root: Path) -> None:
    from ebbtide import _core

    assert list(_core.stats()) == list(read_fields(root))


# --- the finder, seen to find ---


def test_planted_faults_are_found(root: Path) -> None:
    page, fields = (root / "docs/api.md").read_text(), read_fields(root)
    first, meaning = next(iter(fields.items()))
    row = f"| `{first}` | {meaning} |\n"
    assert row in page
    assert find_differences(page.replace(row, ""), fields) == [f"{first}: None, not {meaning!r}"]
    assert find_differences(page.replace(row, f"| `{first}` | wrong |\n"), fields) == [
        f"{first}: 'wrong', not {meaning!r}"
    ]
    assert find_differences(page.replace(row, f"{row}| `gone` | old |\n"), fields) == ["gone: no such field"]
    assert len(find_differences(page.replace("| `pools_made` |", "| pools |"), fields)) == 1
