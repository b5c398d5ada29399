"""The core's messages reach C programs and unmodified ones too: no text in csrc has Python's syntax. Python adds its
own advice (`ebbtide.errors.advise`). The folders that only Python can reach are free to speak it."""

import re
from pathlib import Path

import pytest

# Extension modules of Python; nothing else is linked with them.
OF_PYTHON = ("bindings/", "torch/cpu/", "torch/lms/")

TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<character>'(?:\\.|[^'\\\n])+')|(?P<text>"(?:\\.|[^"\\\n])*")""", re.DOTALL
)
BETWEEN = re.compile(r"[\s]*")
PYTHON = re.compile(
    r"""\bsaver\.\w|\bsaver\(|\.configure\(|\b(?:None|True|False)\b|[a-z_]=\\?["']|[a-z_]=\)|\bimport \w"""
    r"""|\b(?:backup|retain|overflow|threads|wait|timeout)=|\bwith (?:saver|torch|ebbtide)\b"""
)


def texts(source: str) -> list[tuple[int, str]]:
    """The string literals of C++ source with their lines; adjacent ones are one, as for the compiler. Lines of the
    preprocessor are left out."""
    without_includes = re.sub(r"^[ \t]*#[^\n]*", lambda found: " " * len(found.group()), source, flags=re.MULTILINE)
    found: list[tuple[int, str]] = []
    end_of_last = -1
    for token in TOKEN.finditer(without_includes):
        if token.lastgroup != "text":
            continue
        text = token.group()[1:-1]
        if end_of_last >= 0 and BETWEEN.fullmatch(without_includes, end_of_last, token.start()):
            found[-1] = (found[-1][0], found[-1][1] + text)
        else:
            found.append((without_includes.count("\n", 0, token.start()) + 1, text))
        end_of_last = token.end()
    return found


def python_in(source: str) -> list[tuple[int, str]]:
    return [(line, text) for line, text in texts(source) if PYTHON.search(text)]


def test_no_text_of_the_core_speaks_python(root: Path) -> None:
    csrc = root / "csrc"
    scanned, wrong = 0, []
    for path in sorted(csrc.rglob("*")):
        is_source = path.suffix in {".h", ".cpp", ".cu"}  # settings.def describes settings of Python's own, too
        if not is_source or path.relative_to(csrc).as_posix().startswith(OF_PYTHON):
            continue
        source = path.read_text()
        thrown = len(re.findall(r'throw \w+\(\s*"', source))
        assert len(texts(source)) >= thrown, f"{path}: the scan misses texts"
        scanned += thrown
        wrong += [f"{path.relative_to(root)}:{line}: {text}" for line, text in python_in(source)]
    assert scanned > 0
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "use saver.configure(host_limit=)",
        'use backup=\\"ram\\"',
        "backup=None where the content may go",
        "pass missing_ok=True",
        "look at it (saver.backup_of)",
        'overflow=\\"split\\" and more',
        "from None",
        "inside saver.disabled()",
    ],
)
def test_the_law_finds_planted_python(text: str) -> None:
    assert python_in(f'throw StoreError("neutral, "\n "{text}", {{}});') == [(1, f"neutral, {text}")]


@pytest.mark.parametrize(
    "source",
    [
        '// "saver.pause(None)"',
        '/* "saver.pause" */ char c = \'"\'; f("neutral");',
        'f("set EBBTIDE_DRIVER=sim, raise host_limit (EBBTIDE_HOST_LIMIT), overflow: split");',
        'f("ptr=" + text(address) + ", size=" + text(size));',
        '#include "saver.None.h"',
    ],
)
def test_the_law_lets_other_text_pass(source: str) -> None:
    assert python_in(source) == []


def quoted_names(page: str) -> list[str]:
    """The names that docs/errors.md quotes from messages: of the holders, and of the limits that refused."""
    rows = page.partition("lists what ebbtide holds there")[2].partition("\n\n")[2].partition("\n\n")[0]
    holders = [name for row in rows.splitlines()[2:] for name in row.split("|")[1].strip().split(", ")]
    return holders + re.findall(r'^\| "([^"]+)" \|', page, re.MULTILINE)


def test_the_page_quotes_messages_that_there_are(root: Path) -> None:
    names = quoted_names((root / "docs" / "errors.md").read_text())
    said = "\n".join(text for path in sorted((root / "csrc").rglob("*.cpp")) for _, text in texts(path.read_text()))
    said += "\n".join(text for path in sorted((root / "csrc").rglob("*.h")) for _, text in texts(path.read_text()))
    assert len(names) >= 12
    assert [name for name in names if name.partition("'")[0] not in said] == []
