"""The mutations of one source: small changes that a test should notice.

Each operator looks at tokens, not at a syntax tree. A mutation that does not compile costs one file's compilation, and
another is drawn in its place.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .cpp_tokens import Token, find_closing, read_tokens

SWAPPED = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&",
    "+": "-", "-": "+", "+=": "-=", "-=": "+=", "++": "--", "--": "++",
}  # fmt: skip
# First words of statements that are not a call, an assignment or a throw.
NO_STATEMENT = frozenset(
    (
        *(
            "alignas",
            "auto",
            "break",
            "case",
            "catch",
            "class",
            "const",
            "constexpr",
            "constinit",
            "continue",
            "default",
        ),
        *("delete", "do", "else", "enum", "explicit", "extern", "for", "friend", "goto", "if", "inline", "namespace"),
        *(
            "new",
            "noexcept",
            "operator",
            "private",
            "protected",
            "public",
            "return",
            "static",
            "static_assert",
            "struct",
        ),
        *("switch", "template", "try", "typedef", "typename", "union", "using", "virtual", "void", "volatile", "while"),
    )
)
# Calls without an effect that a test could see, but for want of memory.
HARMLESS_CALL = re.compile(r"(?:\.|->)(?:reserve|shrink_to_fit)\s*\(")
DEFAULTS = frozenset({"{}", "false", "nullptr", "0", "std::nullopt", "*this"})
INTEGER = re.compile(r"\d+(?P<suffix>[uUlL]*)")
LOCKS = frozenset({"lock_guard", "scoped_lock"})
NO_OPERATION = "static_cast<void>(0);"

Edit = tuple[str, int, int, str]  # operator, start, end, replacement
Finder = Callable[[str, list[Token], dict[int, int]], Iterator[Edit]]


@dataclass(frozen=True)
class Mutation:
    """One change of one file; path is relative to the tree, line counts from 1."""

    path: str
    line: int
    operator: str
    start: int
    end: int
    replacement: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.replacement + source[self.end :]

    def diff(self, source: str) -> list[str]:
        """The changed lines, "-" and "+", with every run of white space made one space."""
        lines = difflib.unified_diff(source.splitlines(), self.apply(source).splitlines(), n=0, lineterm="")
        return [line[0] + " " + " ".join(line[1:].split()) for line in list(lines)[2:] if line[0] in "-+"]

    @property
    def room(self) -> str:
        """The folder below csrc."""
        return self.path.split("/")[1]


def swap_operators(_: str, tokens: list[Token], __: dict[int, int]) -> Iterator[Edit]:
    for index, token in enumerate(tokens):
        if token.kind != "sign" or token.text not in SWAPPED:
            continue
        is_step = token.text in ("++", "--")
        if is_step or (token.is_spaced and tokens[index - 1].text not in ("operator", "template")):
            yield "swap", token.start, token.end, SWAPPED[token.text]


def negate_conditions(source: str, tokens: list[Token], closing: dict[int, int]) -> Iterator[Edit]:
    for index, token in enumerate(tokens[:-1]):
        if token.text not in ("if", "while") or tokens[index + 1].text != "(" or index + 1 not in closing:
            continue
        first, last = index + 2, closing[index + 1]
        for place in range(first, last):  # after the declaration of "if (x; condition)"
            if tokens[place].text == ";":
                first = place + 1
        start, end = tokens[first].start, tokens[last].start
        if tokens[first].text in ("const", "auto"):
            continue  # a declaration
        yield "negate", start, end, f"!({source[start:end]})"


def drop_negations(_: str, tokens: list[Token], __: dict[int, int]) -> Iterator[Edit]:
    for token in tokens:
        if token.text == "!":
            yield "drop !", token.start, token.end, ""


def drop_else(_: str, tokens: list[Token], __: dict[int, int]) -> Iterator[Edit]:
    for token in tokens:
        if token.text == "else":
            yield "drop else", token.start, token.end, "if (false)"


def change_numbers(_: str, tokens: list[Token], __: dict[int, int]) -> Iterator[Edit]:
    for token in tokens:
        match = INTEGER.fullmatch(token.text) if token.kind == "number" else None
        if match:
            suffix = match["suffix"]
            number = int(token.text[: -len(suffix)] if suffix else token.text)
            for other in (number + 1, number - 1):
                if other >= 0:
                    yield "number", token.start, token.end, f"{other}{suffix}"


def is_statement(source: str, tokens: list[Token], closing: dict[int, int]) -> str | None:
    """What these tokens, without their semicolon, are: "call", "assignment", "lock" or None."""
    words = [token.text for token in tokens]
    if any(name in LOCKS for name in words) and words[-1] == ")" and words[0] in ("const", "std"):
        return "lock"
    if tokens[0].kind != "word" or words[0] in NO_STATEMENT:
        return None
    if words[0] == "throw":
        return "throw"
    after = 1
    while words[after : after + 1] == ["::"]:
        after += 2
    if tokens[after:] and (tokens[after].kind == "word" or words[after] in ("<", "&", "*")):
        return None  # a declaration
    if HARMLESS_CALL.search(source[tokens[0].start : tokens[-1].end]):
        return None
    head = words.index("=") if "=" in words else len(words)
    if head < len(words) and all(re.fullmatch(r"[\w.]+|->|::|\[|\]|\(|\)", word) for word in words[:head]):
        return "assignment"
    return "call" if words[-1] == ")" and "=" not in words else None


def drop_statements(source: str, tokens: list[Token], closing: dict[int, int]) -> Iterator[Edit]:
    for index in range(1, len(tokens)):
        if tokens[index - 1].text not in (";", "{", "}", ")", "else"):
            continue
        end = index
        while end < len(tokens) and tokens[end].text not in (";", "{", "}"):
            end = closing.get(end, end) + 1
        if end >= len(tokens) or tokens[end].text != ";" or end == index:
            continue
        kind = is_statement(source, tokens[index:end], closing)
        if kind is not None:
            yield f"drop {kind}", tokens[index].start, tokens[end].end, NO_OPERATION


def return_early(source: str, tokens: list[Token], closing: dict[int, int]) -> Iterator[Edit]:
    for index, token in enumerate(tokens):
        if token.text == "return":
            end = index + 1
            while end < len(tokens) and tokens[end].text not in (";", "}"):
                end = closing.get(end, end) + 1
            value = source[tokens[index + 1].start : tokens[end - 1].end]
            if value == "true":
                yield "return", tokens[index + 1].start, tokens[end - 1].end, "false"
            elif value == "false":
                yield "return", tokens[index + 1].start, tokens[end - 1].end, "true"
            elif end > index + 1 and value not in DEFAULTS:
                yield "return", tokens[index + 1].start, tokens[end - 1].end, "{}"
        elif token.text == "void":
            body = find_body(tokens, closing, index)
            if body is not None:
                yield "return", tokens[body].end, tokens[body].end, " return;"


def find_body(tokens: list[Token], closing: dict[int, int], index: int) -> int | None:
    """The brace that opens the body of the function whose return type stands at index; None where there is none."""
    place = index + 1
    while place < len(tokens) and (tokens[place].kind == "word" or tokens[place].text == "::"):
        place += 1
    if place == index + 1 or place not in closing or tokens[place].text != "(":
        return None
    place = closing[place] + 1
    while place < len(tokens) and tokens[place].text in ("const", "noexcept", "override", "final"):
        place += 1
    is_body = place < len(tokens) and tokens[place].text == "{" and tokens[place + 1].text != "}"
    return place if is_body else None


FINDERS: tuple[Finder, ...] = (
    swap_operators,
    negate_conditions,
    drop_negations,
    drop_else,
    change_numbers,
    drop_statements,
    return_early,
)


def find_mutations(path: str, source: str) -> list[Mutation]:
    """Every mutation of this file that is known here, in the order of its text."""
    tokens = read_tokens(source)
    closing = find_closing(tokens)
    is_in_assertion = set()
    for index, token in enumerate(tokens):
        if token.text == "static_assert" and index + 1 in closing:
            is_in_assertion.update(range(token.start, tokens[closing[index + 1]].end))
    found = {
        (start, end, replacement): Mutation(path, source.count("\n", 0, start) + 1, name, start, end, replacement)
        for finder in FINDERS
        for name, start, end, replacement in finder(source, tokens, closing)
        if start not in is_in_assertion
    }
    return [found[key] for key in sorted(found)]
