"""The sources of programs that `make programs` downloads into build/programs, or that EBBTIDE_PROGRAMS names."""

import os
import zipfile
from pathlib import Path

import pytest

PROGRAMS = Path(os.environ.get("EBBTIDE_PROGRAMS") or Path(__file__).parents[2] / "build" / "programs")
NOT_THERE = pytest.mark.expected_skip("the sources of this program are not in build/programs")


def unpack(name: str, folder: Path, suffix: str = ".py") -> Path:
    """The folder with the Python files of a program, or those of another suffix: a checkout of this name, or its wheel,
    unpacked. Where there is neither, the test is skipped, which it must expect (NOT_THERE)."""
    if (PROGRAMS / name).is_dir():
        return PROGRAMS / name
    found = next(PROGRAMS.glob(f"{name}-*.whl"), None)
    if found is None:
        pytest.skip(f"{PROGRAMS} has no {name}")
    with zipfile.ZipFile(found) as wheel:
        wheel.extractall(folder, [file for file in wheel.namelist() if file.endswith(suffix)])
    return folder
