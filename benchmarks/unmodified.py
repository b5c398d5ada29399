"""Starts the programs of programs/, plainly or under `ebbtide run`, and gives what they found."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 200
LAST_WORDS = 400
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        figures: what it printed; empty where it failed.
        said: what ebbtide said on stderr.
        status: its exit status.
        last_words: the end of stderr.
    """

    figures: dict[str, Any]
    said: list[str]
    status: int
    last_words: str


class ProgramError(Exception):
    """A program that should have ended well did not."""


def die_with_parent() -> None:
    """A part that is cut off must not leave a program behind on the device."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def to_flags(options: Mapping[str, object]) -> list[str]:
    """Options of `ebbtide run` as words; a switch is True."""
    words = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def start(program: str, options: Mapping[str, object] | None, **arguments: Any) -> Outcome:
    """Runs programs/PROGRAM.py. `options` are those of `ebbtide run`; None: without ebbtide."""
    command = [sys.executable, "-m", f"benchmarks.programs.{program}", json.dumps(arguments)]
    if options is not None:
        command = [sys.executable, "-m", "ebbtide.cli", "run", *to_flags(options), "--", *command]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # threads for small tensors only wait for each other
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
        preexec_fn=die_with_parent,
    )
    lines = done.stdout.strip().splitlines()
    figures = json.loads(lines[-1]) if done.returncode == 0 and lines else {}
    said = [line for line in done.stderr.splitlines() if line.startswith("ebbtide: ")]
    return Outcome(figures, said, done.returncode, done.stderr.strip()[-LAST_WORDS:])


def run(program: str, options: Mapping[str, object] | None, **arguments: Any) -> Outcome:
    """The same of a program that has to end well.

    Raises:
        ProgramError: it did not.
    """
    outcome = start(program, options, **arguments)
    if outcome.status != 0 or not outcome.figures:
        raise ProgramError(f"{program} ended with status {outcome.status}: {outcome.last_words}")
    return outcome
