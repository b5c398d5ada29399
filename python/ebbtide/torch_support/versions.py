"""The versions of torch and Python that ebbtide was tried with, as `make matrix` found them; docs/support.md lists
each.

An older torch is refused. A newer one is used, with one warning: the names that torch does not promise may have changed
(tests/checks/torch_table.py lists those that ebbtide uses).
"""

import re
import sys
import warnings

from ebbtide.errors import StateError

Version = tuple[int, int]

LEAST_PYTHON: Version = (3, 10)
NEWEST_PYTHON: Version = (3, 13)
LEAST_TORCH: Version = (2, 6)
LEAST_TORCH_OF_LMS: Version = (2, 11)
NEWEST_TORCH: Version = (2, 15)


def torch_version(text: str) -> Version:
    """(2, 11) of "2.11.0+cu130".

    Raises:
        StateError: it does not begin with two numbers.
    """
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise StateError(f"torch has the version {text!r}, which does not begin with two numbers")
    return int(match[1]), int(match[2])


def format_version(version: Version) -> str:
    """ "2.6" of (2, 6)."""
    return f"{version[0]}.{version[1]}"


def format_range(least: Version, newest: Version) -> str:
    """ "2.6 to 2.15"."""
    return f"{format_version(least)} to {format_version(newest)}"


TORCH_RANGE = format_range(LEAST_TORCH, NEWEST_TORCH)
PYTHON_RANGE = format_range(LEAST_PYTHON, NEWEST_PYTHON)


def torch_problem(version: Version) -> str:
    """Why regions can't work with this torch; "" where they can."""
    if version >= LEAST_TORCH:
        return ""
    least = format_version(LEAST_TORCH)
    return f"regions need torch {least} or newer, and this is {format_version(version)}: upgrade torch"


def lms_problem(version: Version) -> str:
    """Why large model support can't work with this torch; "" where it can."""
    if version >= LEAST_TORCH_OF_LMS:
        return ""
    least = format_version(LEAST_TORCH_OF_LMS)
    return f"large model support needs torch {least} or newer, and this is {format_version(version)}: upgrade torch"


def untried(torch: Version | None = None, python: Version | None = None) -> str:
    """A sentence about versions newer than any that ebbtide was tried with; "" if there are none."""
    newer = []
    if torch is not None and torch > NEWEST_TORCH:
        newer.append(f"torch {format_version(torch)} (tried: {TORCH_RANGE})")
    if python is not None and python > NEWEST_PYTHON:
        newer.append(f"Python {format_version(python)} (tried: {PYTHON_RANGE})")
    if not newer:
        return ""
    return f"ebbtide was not tried with {' and '.join(newer)}: watch for errors, or use a version that was tried"


def check(torch_text: str) -> None:
    """Refuses a torch that is too old, and warns of a torch or Python newer than any that was tried.

    Raises:
        StateError: torch is too old, or its version can't be read.
    """
    version = torch_version(torch_text)
    problem = torch_problem(version)
    if problem:
        raise StateError(problem)
    sentence = untried(version, sys.version_info[:2])
    if sentence:
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)
