"""Python sources as trees. Several checks read the same files, so each is parsed once."""

import ast
from functools import cache


@cache
def parse(text: str) -> ast.Module:
    """The tree of a source. Nobody changes it."""
    return ast.parse(text)


@cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """All nodes of a source, in the order of `ast.walk`."""
    return tuple(ast.walk(parse(text)))
