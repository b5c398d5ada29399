"""Lines of prose that are too wide: in Markdown, in comments, and in docstrings."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

MAX_COLUMNS = 120
URL = re.compile(r"https?://\S+")
FENCE = re.compile(r"^\s*(```|~~~)")
# A string or character literal, or what opens a comment. Literals first: "//" in one opens nothing.
C_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|//.*|/\*')
HASH_COMMENT = re.compile(r"(?:^|\s)#")

Numbered = Iterator[tuple[int, str]]


def is_wide(line: str) -> bool:
    """Without the addresses in it, which cannot be broken."""
    return len(line) > MAX_COLUMNS and len(URL.sub("", line)) > MAX_COLUMNS


def markdown_prose(text: str) -> Numbered:
    """Lines outside of code blocks and tables."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line):
            is_code = not is_code
        elif not is_code and not line.lstrip().startswith("|"):
            yield number, line


def c_comments(text: str) -> Numbered:
    """Lines in which there is a comment, of C and C++."""
    is_inside = False
    for number, line in enumerate(text.splitlines(), 1):
        has_comment, rest = is_inside, line
        while rest:
            if is_inside:
                _, end, rest = rest.partition("*/")
                is_inside = not end
                continue
            opened = next((match for match in C_TOKEN.finditer(rest) if match[0].startswith("/")), None)
            if opened is None:
                break
            has_comment = True
            is_inside = opened[0] == "/*"
            rest = rest[opened.end() :]
        if has_comment:
            yield number, line


def python_prose(text: str) -> Numbered:
    """Lines with a comment, and lines of docstrings."""
    lines = text.splitlines()
    numbers = {token.start[0] for token in comments_of(text)}
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None:
            numbers |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    for number in sorted(numbers):
        yield number, lines[number - 1]


def comments_of(text: str) -> Iterator[tokenize.TokenInfo]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return (token for token in tokens if token.type == tokenize.COMMENT)


def hash_comments(text: str) -> Numbered:
    """Lines with a comment, of a shell, of make and of CMake."""
    return ((number, line) for number, line in enumerate(text.splitlines(), 1) if HASH_COMMENT.search(line))


PROSE: dict[str, Callable[[str], Numbered]] = {
    ".md": markdown_prose,
    **dict.fromkeys((".h", ".c", ".cpp", ".cu", ".def"), c_comments),
    **dict.fromkeys((".py", ".pyi"), python_prose),
    **dict.fromkeys((".sh", ".mk", ".cmake", ".txt", ".toml", ".yml"), hash_comments),
}


def find_wide_lines(root: Path, checked: Iterable[str]) -> list[str]:
    """A sentence for each line of prose that is too wide, in the files and folders named."""
    faults = []
    for name in checked:
        place = root / name
        if not place.exists():
            raise FileNotFoundError(f"{name} is on the list of checked files, and does not exist")
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            prose = PROSE.get(path.suffix)
            text = path.read_text() if prose else ""
            if prose is None or not any(map(is_wide, text.splitlines())):  # most: to read their prose takes long
                continue
            for number, line in prose(text):
                if is_wide(line):
                    faults.append(f"{path.relative_to(root).as_posix()}:{number}: {len(line)} columns")
    return faults
