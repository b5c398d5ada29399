"""Real text to train on that every Python brings along."""

import argparse
import ast
import collections
import inspect
import subprocess
import threading
import typing
import unittest.mock

# One line of ASCII a character: small enough for a model that learns within seconds.
VOCABULARY_SIZE = 128
_FALLBACK_MODULES = (argparse, ast, collections, inspect, subprocess, threading, typing, unittest.mock)


def load_text(characters: int = 200_000) -> str:
    """The Python reference's pages as `help()` shows them or, where a distribution left them out, the standard
    library's own sources: up to `characters` characters of ASCII.
    """
    try:
        from pydoc_data.topics import topics

        pages = [topics[name] for name in sorted(topics)]
    except ImportError:
        pages = [inspect.getsource(module) for module in _FALLBACK_MODULES]
    text = "\n".join(pages)[:characters]
    return text.encode("ascii", "replace").decode("ascii")


def encode(text: str) -> list[int]:
    """Character codes, each below VOCABULARY_SIZE."""
    return [ord(character) for character in text]


def decode(tokens: list[int]) -> str:
    """The text of these codes."""
    return "".join(map(chr, tokens))
