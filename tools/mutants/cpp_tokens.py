"""Just enough of C++ to find places to mutate: tokens with their offsets, and matching brackets.

Comments, preprocessor directives and string literals are tokens of their own kind, so that no operator looks into them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TOKEN = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<directive>\#(?:\\\n|[^\n])*)
  | (?P<string>(?:u8|[uUL])?R"(?P<fence>[^\s(]*)\(.*?\)(?P=fence)"|(?:u8|[uUL])?"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')
  | (?P<number>\.?\d(?:'?[\w.])*)
  | (?P<word>[A-Za-z_]\w*)
  | (?P<sign><=>|<<=|>>=|->\*|\.\.\.|::|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.)
    """,
    re.DOTALL | re.VERBOSE,
)
PAIRS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Token:
    """A word, number, string or sign of the source.

    Attributes:
        is_spaced: white space stands on both sides. clang-format writes binary operators so, and neither template
            brackets nor references.
    """

    kind: str
    text: str
    start: int
    end: int
    is_spaced: bool


def read_tokens(source: str) -> list[Token]:
    """The tokens that make up the program: no white space, comments or directives."""
    found = []
    for match in TOKEN.finditer(source):
        kind = match.lastgroup if match.lastgroup != "fence" else "string"
        if kind in ("space", "comment", "directive"):
            continue
        around = source[match.start() - 1 : match.start()] + source[match.end() : match.end() + 1]
        found.append(Token(str(kind), match[0], match.start(), match.end(), len(around) == 2 and around.isspace()))
    return found


def find_closing(tokens: list[Token]) -> dict[int, int]:
    """The index of each opening bracket and of the one that closes it."""
    closing, is_open = {}, []
    for index, token in enumerate(tokens):
        if token.kind != "sign":
            continue
        if token.text in PAIRS:
            is_open.append(index)
        elif is_open and token.text == PAIRS[tokens[is_open[-1]].text]:
            closing[is_open.pop()] = index
    return closing
