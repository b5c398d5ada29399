"""What comments, docstrings and Markdown pages cite: facts and invariants of csrc/DESIGN.md, its tests, files."""

import ast
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path

DESIGN = "csrc/DESIGN.md"

SUFFIXES = "py|pyi|cpp|c|h|cu|def|ptx|cmake|mk|map|sh|md|toml|yml|yaml|txt|json|svg|html"
FILE = re.compile(rf"(?<![\w/.$*{{<%@-])((?:[\w.-]+/)*\w[\w-]*\.(?:{SUFFIXES}))\b(?![\w/(*])")
TOP_FOLDERS = "benchmarks|cmake|csrc|docs|examples|python|requirements|tests|tools"
FOLDER = re.compile(rf"(?<![\w/.$*{{<%@-])((?:\.\./)*(?:{TOP_FOLDERS})/(?:[\w.-]+/)*[\w-]*)(?![\w/*<{{-]|\.\w)")
# Files that are cited and are not the repository's: headers of others, and a program.
FOREIGN = {"Python.h", "cuda.h", "cudaTypedefs.h", "llama.cpp", "test_cumem.py"}
# Files that a build, a tool or a user makes, and placeholders in usage lines.
MADE = {"NAME", "PROGRAM.py", "compile_commands.json", "first.json", "plan.json", "second.json", "tuning.json"}

FACT = re.compile(r"\bF(\d{1,3})\b")
INVARIANT = re.compile(r"\b[Ii]nvariants?[ _]?(\d+)((?:(?:, |,? and | to |And)\d+)*)|_invariants?_?(\d+)")
FACT_ENTRY = re.compile(r"^- \*\*F(\d+)\.\*\* ", re.MULTILINE)
INVARIANT_ENTRY = re.compile(r"^- \*\*Invariant (\d+)\.\*\* ", re.MULTILINE)
PYTHON_TEST = re.compile(r"`(test_\w+)`")
GTEST = re.compile(r"`([A-Z]\w*)\.([A-Z]\w*\*?)`")
NO_TEST = "No test"

C_TOKENS = re.compile(
    r"""R"\w*\(.*?\)\w*" | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])' | (?P<comment>//[^\n]*|/\*.*?\*/)""",
    re.DOTALL | re.VERBOSE,
)
PYTHON_TOKENS = re.compile(
    r"""(["'])\1\1(?:\\.|[^\\])*?\1\1\1 | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' | (?P<comment>\#[^\n]*)""",
    re.DOTALL | re.VERBOSE,
)
C_SUFFIXES = {".cpp", ".h", ".c", ".cu", ".def"}
HASH_SUFFIXES = {".cmake", ".mk", ".sh", ".toml", ".yml", ".txt", ".map"}
HASH_NAMES = {"Makefile", "run", ".clang-tidy", ".clang-format"}
PRUNED = {"build", "dist", "wheelhouse", "__pycache__"}


def files_of(root: Path) -> list[str]:
    """The repository's files, as their paths; files that a build makes are left out."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in PRUNED and (not name.startswith(".") or name == ".ci")]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in names]
    return sorted(found)


def prose_of(path: str, text: str) -> Iterator[tuple[int, str]]:
    """The comments, docstrings or Markdown of a file, each with its first line's number."""
    suffix, name = Path(path).suffix, Path(path).name
    if suffix in {".py", ".pyi"}:
        yield from _prose_of_python(text)
    elif suffix in C_SUFFIXES:
        for match in C_TOKENS.finditer(text):
            if match["comment"]:
                yield text.count("\n", 0, match.start()) + 1, match["comment"]
    elif suffix == ".md":
        yield 1, text
    elif suffix in HASH_SUFFIXES or name in HASH_NAMES:
        for number, line in enumerate(text.splitlines(), 1):
            if match := re.search(r"(?:^|\s)#.*", line):
                yield number, match[0]


@cache  # several checks read the same files
def _prose_of_python(text: str) -> tuple[tuple[int, str], ...]:
    comments = ((match.start("comment"), match["comment"]) for match in PYTHON_TOKENS.finditer(text))
    found = [(text.count("\n", 0, start) + 1, comment) for start, comment in comments if comment]
    statements: list[ast.AST] = [ast.parse(text)]
    while statements:  # ast.walk would visit every expression, too
        node = statements.pop()
        has_body = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if has_body and (docstring := ast.get_docstring(node, clean=False)):
            found.append((node.body[0].lineno, docstring))
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            inner = getattr(node, part, [])
            statements += inner if isinstance(inner, list) else []
    return tuple(found)


def numbers_of(match: re.Match[str]) -> set[int]:
    """Of an INVARIANT match: "invariants 1 to 3 and 7" cites four."""
    if match[3]:
        return {int(match[3])}
    numbers = {int(match[1])}
    previous = int(match[1])
    for joint, digits in re.findall(r"(, |,? and | to |And)(\d+)", match[2]):
        number = int(digits)
        numbers |= set(range(previous, number + 1)) if joint == " to " else {number}
        previous = number
    return numbers


@dataclass
class Citations:
    """The citations of the repository under `root`, held against what there is."""

    root: Path
    foreign: set[str] = field(default_factory=lambda: FOREIGN | MADE)

    @cached_property
    def files(self) -> list[str]:
        return files_of(self.root)

    @cached_property
    def names(self) -> set[str]:
        """The names by which a file may be cited, "mapping.h" or "vmm/mapping.h", and every folder."""
        found = set()
        for path in self.files:
            parts = path.split("/")
            found |= {"/".join(parts[start:]) for start in range(len(parts))}
            found |= {"/".join(parts[:end]) for end in range(1, len(parts))}
        return found

    @cached_property
    def design(self) -> str:
        return (self.root / DESIGN).read_text()

    @cached_property
    def facts(self) -> list[int]:
        return [int(number) for number in FACT_ENTRY.findall(self.design)]

    @cached_property
    def invariants(self) -> list[int]:
        return [int(number) for number in INVARIANT_ENTRY.findall(self.design)]

    @cached_property
    def python_tests(self) -> Counter[str]:
        """Each test function under tests/, and how many there are of that name."""
        sources = [path for path in self.files if path.startswith("tests/") and path.endswith(".py")]
        found = [re.findall(r"^def (test_\w+)\(", (self.root / path).read_text(), re.MULTILINE) for path in sources]
        return Counter(name for names in found for name in names)

    @cached_property
    def gtests(self) -> set[str]:
        """Every "Suite.Name" of the C++ tests."""
        sources = [path for path in self.files if path.startswith("tests/cpp/") and path.endswith(".cpp")]
        found = [
            re.findall(r"^TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\)", (self.root / path).read_text(), re.MULTILINE)
            for path in sources
        ]
        return {f"{suite}.{name}" for each in found for suite, name in each}

    def has_file(self, cited: str) -> bool:
        """Whether a file, or a folder, ends in this path."""
        wanted = re.sub(r"^(?:\.\.?/)+", "", cited).rstrip("/")
        if wanted.rpartition("/")[2] in self.foreign or wanted in self.foreign:
            return True
        return wanted in self.names

    def find_faults(self) -> list[str]:
        """A sentence for each citation that leads nowhere."""
        faults = []
        for path in self.files:
            if Path(path).suffix in {".json", ".svg", ".ptx"}:
                continue
            try:
                text = (self.root / path).read_text()
            except UnicodeDecodeError:
                continue
            for line, prose in prose_of(path, text):
                faults += [f"{path}: {fault} (in the text from line {line} on)" for fault in self._faults_of(prose)]
            if path.startswith("tests/"):
                names = "\n".join(re.findall(r"^(?:def test_\w+|TEST(?:_F|_P)?\([^)]*)", text, re.MULTILINE))
                faults += [f"{path}: {fault} (a test's name)" for fault in self._unknown_invariants(names)]
        return list(dict.fromkeys(faults))

    def _faults_of(self, prose: str) -> Iterator[str]:
        for cited in {*FILE.findall(prose), *FOLDER.findall(prose)}:
            if not self.has_file(cited):
                yield f"{cited} is not in the repository"
        for number in {int(each) for each in FACT.findall(prose)} - set(self.facts):
            yield f"{DESIGN} has no F{number}"
        yield from self._unknown_invariants(prose)

    def _unknown_invariants(self, text: str) -> Iterator[str]:
        cited = {number for match in INVARIANT.finditer(text) for number in numbers_of(match)}
        for number in sorted(cited - set(self.invariants)):
            yield f"{DESIGN} has no invariant {number}"

    def find_faults_of_design(self) -> list[str]:
        """Entries out of order, without a test or a word on it, and tests that do not exist."""
        faults = []
        for name, numbers in (("facts", self.facts), ("invariants", self.invariants)):
            if not numbers or numbers != list(range(1, len(numbers) + 1)):
                faults.append(f"the {name} are numbered {numbers}")
        for entry, title in self._entries():
            if not (PYTHON_TEST.search(entry) or GTEST.search(entry) or NO_TEST in entry):
                faults.append(f"{title} names no test, and does not say '{NO_TEST}'")
        for name in PYTHON_TEST.findall(self.design):
            if (count := self.python_tests[name]) != 1:
                faults.append(f"there are {count} tests of the name {name}")
        for suite, name in GTEST.findall(self.design):
            if not any(fnmatchcase(each, f"{suite}.{name}") for each in self.gtests):
                faults.append(f"there is no test {suite}.{name}")
        return faults

    def _entries(self) -> Iterator[tuple[str, str]]:
        """Each fact and each invariant, up to the next one or the next heading; and its title."""
        for pattern in (FACT_ENTRY, INVARIANT_ENTRY):
            for match in pattern.finditer(self.design):
                end = re.compile(rf"^#|{pattern.pattern}", re.MULTILINE).search(self.design, match.end())
                yield self.design[match.start() : end.start() if end else None], match[0].strip("-* .")
