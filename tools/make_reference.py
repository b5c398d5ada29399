"""Writes the reference pages, so that they need no tool to read and the site no build of ebbtide: docstrings and
signatures of the Python sources, the headers of the C API, the help of the commands. Run it with ebbtide installed.
tests/python/test_docs_pages.py compares the pages with it."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/api.md", "docs/c_api.md", "docs/cli/reference.md")
_COLUMNS = 120
# The tool writes the text between the two comments.
_MARK = re.compile(r"^<!-- reference: (\S+) -->\n(?:(?:(?!<!-- ).*\n)*<!-- end -->\n)?", re.MULTILINE)
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$")
_ENTRY = re.compile(r"^([\w.]+(?:, [\w.]+)*): (.*)$", re.DOTALL)
# Public for other rooms of the package, not for its users.
_INTERNAL = {"attach", "from_core", "joined", "of", "with_freed"}


def write_reference(page: str) -> str:
    """The page, with the reference below each of its marks made anew."""
    return _MARK.sub(lambda mark: f"<!-- reference: {mark[1]} -->\n{_reference(mark[1])}<!-- end -->\n", page)


def _reference(name: str) -> str:
    if name.endswith(".h"):
        return f"\n```c\n{(ROOT / name).read_text()}```\n\n"
    module, _, attribute = name.rpartition(".")
    thing = getattr(importlib.import_module(module), attribute)
    if isinstance(thing, click.Command):
        return "\n" + "\n\n".join(_describe_command(thing, f"ebbtide {attribute}")) + "\n\n"
    shown = name.removeprefix("ebbtide.") if module == "ebbtide.saver" else f"ebbtide.{attribute}"
    shown = name if module == "ebbtide.lms" else shown
    parts = [f"### {shown}", *_describe(thing, attribute)]
    for member, each in _members(thing) if inspect.isclass(thing) else ():
        parts += [f"#### {attribute}.{member}", *_describe(each, member)]
    return "\n" + "\n\n".join(parts) + "\n\n"


def _describe_command(command: click.Command, path: str) -> Iterator[str]:
    """Its usage, help and options, and those of the commands below it. Not by click's own formatter, whose words differ
    between its versions."""
    parameters = [each for each in command.get_params(click.Context(command)) if "--help" not in each.opts]
    options = [each for each in parameters if isinstance(each, click.Option)]
    arguments = [each.metavar or f"{{{'|'.join(each.type.choices)}}}" for each in parameters if each not in options]
    commands = command.commands if isinstance(command, click.Group) else {}
    words = [path, *(["[OPTIONS]"] if options else []), *(["COMMAND"] if commands else []), *arguments]
    yield f"## {path}"
    yield f"```sh\n{' '.join(words)}\n```"
    yield from _as_markdown(inspect.cleandoc(command.help or ""))
    if options:
        yield "\n".join(map(_describe_option, options))
    for name, each in commands.items():
        yield from _describe_command(each, f"{path} {name}")


def _describe_option(option: click.Option) -> str:
    value = "" if option.is_flag else f" {option.metavar or option.type.name.upper()}"
    names = ", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))
    default = f" [default: {option.default}]" if option.show_default else ""
    return _wrap(f"{names}: {option.help}{default}", "- ")


def _members(thing: type) -> Iterator[tuple[str, Any]]:
    for name, each in vars(thing).items():
        is_member = inspect.isfunction(each) or isinstance(each, property)
        if is_member and not name.startswith("_") and name not in _INTERNAL:
            yield name, each


def _describe(thing: Any, name: str) -> Iterator[str]:
    if inspect.isfunction(thing):
        yield f"```python\n{_signature(thing, name)}\n```"
    yield from _as_markdown(inspect.getdoc(thing) or "")


def _signature(function: Any, name: str) -> str:
    """As the source has it: what Python makes of it differs between its versions."""
    source = textwrap.dedent(inspect.getsource(function))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    lines = source.splitlines()[definition.lineno - 1 : definition.body[0].lineno - 1]
    header = re.sub(r"^def \w+", f"def {name}", "\n".join(lines)) + " ..."
    if "\n" in header or len(header) <= _COLUMNS:
        return header
    return re.sub(r"^(.*?\()(.*)(\) -> .*)$", r"\1\n    \2\n\3", header)  # as the formatter has it


def _as_markdown(docstring: str) -> Iterator[str]:
    """Paragraphs, examples and lists of a docstring in Google's style."""
    for block in re.split(r"\n{2,}(?! )|\n{2,}(?=    \S)", docstring):
        heading = _SECTION.match(block.split("\n")[0])
        text = textwrap.dedent(block.partition("\n")[2] if heading else block)
        if heading:
            yield f"**{heading[1]}**"
        if heading and heading[1] not in ("Returns", "Yields"):
            yield "\n".join(map(_entry, _items(text)))
        elif text.startswith("- "):
            yield "\n".join(_wrap(each.removeprefix("- "), "- ") for each in _items(text))
        elif block.startswith("    "):
            yield f"```python\n{text}\n```"
        else:
            yield _wrap(text)


def _items(text: str) -> list[str]:
    return re.split(r"\n(?! )", text)


def _entry(text: str) -> str:
    match = _ENTRY.match(text)
    if match is None:
        return _wrap(text, "- ")
    names = ", ".join(f"`{name}`" for name in match[1].split(", "))
    return _wrap(f"{names}: {match[2]}", "- ")


def _wrap(text: str, bullet: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()),
        _COLUMNS,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(write_reference(path.read_text()))
