"""Writes the tables of docs/settings.md from the list of settings (csrc/base/settings.def); run it with ebbtide
installed. tests/python/test_docs_pages.py holds the page against it."""

import re
from pathlib import Path

from ebbtide.settings import Setting, all_settings

_VALUES = {
    "size": "a size",
    "switch": "0 or 1",
    "tag": "a tag",
    "folder": "a folder",
    "file": "a file",
}


def write_tables(page: str) -> str:
    """The page with its tables made anew: each begins with its first heading."""
    for heading, rows in (("variable", _variables()), ("saver.configure", _configure())):
        table = "\n".join(rows) + "\n"
        page, count = re.subn(rf"^\| {heading} \|.*\n(?:\|.*\n)*", lambda _, table=table: table, page, flags=re.M)
        if count != 1:
            raise ValueError(f"the page has {count} tables that begin with {heading!r}")
    return page


def _variables() -> list[str]:
    rows = [
        f"| `{setting.variable}` | {_value(setting)} | {setting.fallback} | {_given(setting)} | {setting.meaning} |"
        for setting in all_settings()
    ]
    return ["| variable | value | default | also set by | meaning |", "|---|---|---|---|---|", *rows]


def _configure() -> list[str]:
    rows = [
        f"| `{setting.name}=` | {_value(setting, in_python=True)} | {setting.none or 'refused'} |"
        for setting in all_settings()
        if setting.is_configurable
    ]
    return ["| saver.configure | value | None means |", "|---|---|---|", *rows]


def _value(setting: Setting, in_python: bool = False) -> str:
    if setting.kind == "switch" and in_python:
        return "True or False"
    if setting.kind == "count":
        return setting.values.replace("|", " to ")
    return ", ".join(setting.choices) or _VALUES[setting.kind]


def _given(setting: Setting) -> str:
    option = f"`--{setting.name.replace('_', '-')}`" if setting.is_run_option else ""
    return ", ".join(filter(None, ("`configure`" if setting.is_configurable else "", option)))


if __name__ == "__main__":
    path = Path(__file__).parents[1] / "docs" / "settings.md"
    path.write_text(write_tables(path.read_text()))
