"""The names on a page of the documentation that do not exist."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
CODE_SUFFIXES = (".py", ".pyi", ".h", ".cpp", ".c", ".cu", ".def", ".cmake", ".sh", ".mk", ".map")
SUFFIXES = (*CODE_SUFFIXES, ".md", ".toml", ".txt", ".json")
# Made by the build or by a user: a page may name them though no checkout holds them.
MADE = ("build/", "dist/", ".venv/", "train.py")


@dataclass
class Known:
    """The names that exist.

    Attributes:
        commands: each command with its options.
        signatures: each public name of ebbtide.saver with its parameters; None for what takes any, or is no function.
        package: public names of ebbtide.
        folders: where a page's relative paths may start, beside its own folder.
    """

    root: Path
    symbols: set[str]
    variables: set[str]
    make_targets: set[str]
    commands: dict[str, set[str]]
    signatures: dict[str, set[str] | None]
    package: set[str]
    folders: tuple[str, ...] = ("", "csrc", "csrc/api", "csrc/driver", "python/ebbtide", "tests")
    options: set[str] = field(default_factory=lambda: {"--help", "--version"})


def find_unknown_names(page: Path, known: Known) -> list[str]:
    """A sentence for each name on the page that does not exist."""
    text = page.read_text()
    blocks = [(match["language"], match["text"]) for match in FENCE.finditer(text)]
    spans = SPAN.findall(FENCE.sub("", text))
    code = [*spans, *(block for _, block in blocks)]
    faults = [f"the link {target}" for target in LINK.findall(text) if not (page.parent / target).exists()]
    faults += unknown_paths(spans, page, known)
    faults += unknown_words(code, r"\bebbtide_\w+", known.symbols)
    faults += unknown_words([text], r"\bEBBTIDE_[A-Z][A-Z_0-9]*\b", known.variables)
    faults += unknown_make_targets(code, known)
    faults += unknown_commands(code, known)
    faults += unknown_words(code, r"(?<![\w./])ebbtide\.(?!__)([A-Za-z_]+)\b(?!/)", known.package)
    faults += unknown_words(code, r"(?<![\w./])saver\.([A-Za-z_]+)\b(?!/)", set(known.signatures))
    for language, block in blocks:
        if language in ("python", "py"):
            faults += faults_of_python(block, known)
    return [f"{page.name}: {fault}" for fault in dict.fromkeys(faults)]


def unknown_words(texts: Iterable[str], pattern: str, known: set[str]) -> list[str]:
    names = {name for text in texts for name in re.findall(pattern, text)}
    return [f"{name} does not exist" for name in sorted(names - known)]


def unknown_paths(spans: Iterable[str], page: Path, known: Known) -> Iterator[str]:
    for span in spans:
        is_path = PATH.fullmatch(span) and ("/" in span or span.endswith(SUFFIXES))
        if not is_path or span.startswith(MADE) or (span.count("/") and not span.endswith(("/", *SUFFIXES))):
            continue
        places = [page.parent, *(known.root / folder for folder in known.folders)]
        if not any((place / span).exists() for place in places):
            yield f"the path {span} does not exist"


def unknown_make_targets(code: Iterable[str], known: Known) -> Iterator[str]:
    for text in code:
        for target in re.findall(r"(?:^|[\s(;&])make ([a-z][a-z-]*)\b", text):
            if target not in known.make_targets:
                yield f"make {target} does not exist"


def unknown_commands(code: Iterable[str], known: Known) -> Iterator[str]:
    """`ebbtide COMMAND --option ...`, up to a `--` that begins another program's words."""
    for text in code:
        for command, rest in re.findall(r"^(?:\$ )?ebbtide ([a-z][a-z-]*)\b([^\n|;&#]*)", text, re.MULTILINE):
            if command not in known.commands:
                yield f"the command `ebbtide {command}` does not exist"
                continue
            own_words = re.split(r"(?:^|\s)--(?:\s|$)", rest)[0]
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", own_words):
                if option not in known.commands[command] | known.options:
                    yield f"`ebbtide {command}` has no option {option}"


def faults_of_python(block: str, known: Known) -> Iterator[str]:
    """An example must parse, and its keywords must be the functions' own."""
    try:
        tree = ast.parse(block)
    except SyntaxError as error:
        yield f"an example does not parse: {error.msg}: {(error.text or '').strip()}"
        return
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = call.func
        if (
            isinstance(function, ast.Attribute)
            and isinstance(function.value, ast.Name)
            and function.value.id == "saver"
        ):
            parameters = known.signatures.get(function.attr)
            for keyword in call.keywords if parameters is not None else []:
                if keyword.arg is not None and parameters is not None and keyword.arg not in parameters:
                    yield f"saver.{function.attr} has no parameter {keyword.arg}"


def read_make_targets(makefile: Path) -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", makefile.read_text(), re.MULTILINE))


def words_of(files: Iterable[Path], pattern: str) -> set[str]:
    """Every match of the pattern in the files."""
    return {word for file in files for word in re.findall(pattern, file.read_text())}


def variables_read(root: Path) -> dict[str, list[str]]:
    """Each EBBTIDE_* environment variable that the product reads -> the files that do."""
    reads: dict[str, list[str]] = {}
    patterns: dict[str, Callable[[str], list[str]]] = {
        ".cpp": lambda text: re.findall(r'getenv\("(EBBTIDE_\w+)"\)', text),
        ".py": lambda text: re.findall(
            r'(?:environ(?:\.get|\.pop|\.setdefault)?|getenv)\s*[\[(]\s*"(EBBTIDE_\w+)"', text
        ),
    }
    for folder in ("csrc", "python"):
        for path in sorted((root / folder).rglob("*")):
            for name in patterns[path.suffix](path.read_text()) if path.suffix in patterns else []:
                reads.setdefault(name, []).append(path.relative_to(root).as_posix())
    return reads
