"""Which interpreters a machine has: for the tools that try ebbtide with several."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path


def find_interpreters(versions: Sequence[str], given: Sequence[str] = ()) -> dict[str, Path]:
    """Each of the versions ("3.12") that is here, with its interpreter: one of `given`, the one on PATH, or pyenv's."""
    named = [Path(path) for path in given]
    found: dict[str, Path] = {}
    for version in versions:
        on_path = shutil.which(f"python{version}")
        pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python{version}"))
        for path in [*named, *([Path(on_path)] if on_path else []), *reversed(pyenv)]:
            if is_usable(path, version):
                found.setdefault(version, path)
    return found


def is_usable(interpreter: Path, version: str) -> bool:
    """Whether it runs, is of that version, and can make environments and compile extensions."""
    code = (
        "import ensurepip, os, sys, sysconfig, venv; "
        "assert os.path.exists(sysconfig.get_path('include') + '/Python.h'); "
        "print('%d.%d' % sys.version_info[:2])"
    )
    try:
        done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.strip() == version
