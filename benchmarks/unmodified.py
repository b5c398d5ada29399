"""Starts the programs of programs/, plainly or under `ebbtide run`, and gives their results."""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
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
        figures: its last output, also where it failed later; empty where it printed none.
        said: ebbtide's lines on stderr.
        status: its exit status.
        last_words: the end of stderr.
        seconds: from its start to its end.
    """

    figures: dict[str, Any]
    said: list[str]
    status: int
    last_words: str
    seconds: float


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


def command_of(program: str, options: Mapping[str, object] | None, arguments: Mapping[str, Any]) -> list[str]:
    """Of programs/PROGRAM.py. `options` are those of `ebbtide run`; None: without ebbtide."""
    command = [sys.executable, "-m", f"benchmarks.programs.{program}", json.dumps(arguments)]
    if options is not None:
        command = [sys.executable, "-m", "ebbtide.cli", "run", *to_flags(options), "--", *command]
    return command


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}  # threads for small tensors only wait for each other


def start(
    program: str,
    options: Mapping[str, object] | None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    variables: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Outcome:
    """Runs programs/PROGRAM.py. `options` are those of `ebbtide run`; None: without ebbtide.

    One that takes longer than the timeout is ended, and its last words say so. `variables` are its environment's.
    """
    started = time.monotonic()
    try:
        done = subprocess.run(
            command_of(program, options, arguments),
            cwd=ROOT,
            env=environment() | dict(variables or {}),
            capture_output=True,
            timeout=timeout_seconds,
            check=False,
            preexec_fn=die_with_parent,
        )
        printed, end, status = (done.stdout, done.stderr), "", done.returncode
    except subprocess.TimeoutExpired as late:
        printed, end, status = (late.stdout, late.stderr), f"; took longer than {timeout_seconds:g} s", -signal.SIGKILL
    output, errors = ((text or b"").decode(errors="replace") for text in printed)
    said = [line for line in errors.splitlines() if line.startswith("ebbtide: ")]
    last_words = errors.strip()[-LAST_WORDS:] + end
    return Outcome(figures_in(output), said, status, last_words, time.monotonic() - started)


def figures_in(output: str) -> dict[str, Any]:
    """The last line that is an object of JSON."""
    for line in reversed(output.splitlines()):
        try:
            figures = json.loads(line)
        except ValueError:
            continue
        if isinstance(figures, dict):
            return figures
    return {}


def spilled_bytes(said: Iterable[str]) -> int | None:
    """What --summary says of all that went to the host; None: there is no summary."""
    units = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
    for line in said:
        if not line.startswith("ebbtide: summary of "):
            continue
        if line.endswith("; nothing overflowed to the host"):
            return 0
        if found := re.search(r"; ([\d.]+) (\w+) of \d+ allocations? went to the host", line):
            return int(float(found[1]) * units[found[2]])
    return None


def run(program: str, options: Mapping[str, object] | None, **arguments: Any) -> Outcome:
    """The same of a program that has to end well.

    Raises:
        ProgramError: it did not.
    """
    outcome = start(program, options, **arguments)
    if outcome.status != 0 or not outcome.figures:
        raise ProgramError(f"{program} ended with status {outcome.status}: {outcome.last_words}")
    return outcome
