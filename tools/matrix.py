#!/usr/bin/env python3
"""Tries ebbtide with each torch and each Python that it supports: `make matrix`.

One row after the other: a fresh virtual environment in build/matrix/, torch as `pip install torch==X` gives it (the
CUDA build, up to 7 GB), a wheel of ebbtide, the essential part of the Python tests on the simulated device, and the
environment is removed. Each row's counts stay in build/matrix/results/, and go into the table in docs/support.md. A row
that was not tried keeps its entry in the table, with its day. No GPU is needed.

It works on a copy of the sources that is made when it starts, so that they may be changed meanwhile. Stopped and
started again, it goes on where it was: a row with a result for the same sources is not tried again (but with --again),
and an environment that has its torch keeps it. A row that could not be set up (no network, no room) has no result.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from interpreters import find_interpreters

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "matrix"
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- Made by `make matrix`: from here -->", "<!-- to here -->"

# Each torch with the newest Python that it has wheels for.
NEWEST_PYTHON = {
    **dict.fromkeys(("2.6.0", "2.7.1", "2.8.0"), "3.13"),
    **dict.fromkeys(("2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"), "3.14"),
}
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCH_OF_EVERY_PYTHON = "2.13.0"
# Of tests/python: the files that meet torch and Python, with later ones of these names.
TESTS = ("test_saver_*.py", "test_torch_*.py", "test_support.py", "test_cli.py")
# With a torch that large model support works with.
LMS_FROM = "2.11"
LMS_TESTS = (
    *("test_lms.py", "test_lms_saved_hooks.py", "test_lms_gradient_homes.py", "test_lms_streamed_step.py"),
    "test_lms_weights_training.py",
)
# These take long, or meet torch no more than the others do.
LEFT_OUT = {
    f"test_saver_{name}.py"
    for name in ("errors", "gpu", "names", "overflow", "prepare", "program", "settings", "sizes", "skips", "spike")
}
# What decides a result, apart from torch and Python. The tests' own tools do not.
SOURCES = (
    *("csrc/", "cmake/", "python/", "requirements/build.txt", "tests/conftest.py", "tests/python/"),
    *("pyproject.toml", "CMakeLists.txt"),
)
VERSIONS = (
    "import platform, torch\nprint(torch.__version__, torch.version.cuda or '', platform.python_version(), sep='|')"
)
FIRST_REGION = "from ebbtide import saver\nwith saver.region('a'): import torch; torch.ones(3)\nsaver.pause()"
LEAST_ROOM_BYTES = 12 << 30
INSTALL_SECONDS, BUILD_SECONDS, TEST_SECONDS = 3600, 3600, 7200


class SetupError(Exception):
    """A row could not be tried; its result is not known."""


@dataclass(frozen=True)
class Row:
    """One environment. `python` is "3.13", `torch` "2.6.0"."""

    torch: str
    python: str

    @property
    def name(self) -> str:
        return f"torch-{self.torch}-py{self.python}"


@dataclass
class Result:
    """The result of a row. `reason` says why there are no counts, where there are none."""

    torch: str
    python: str
    sources: str
    installed_torch: str = ""
    cuda: str = ""
    full_python: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    reason: str = ""
    day: str = field(default_factory=lambda: datetime.date.today().isoformat())


def choose_rows(interpreters: Mapping[str, Path]) -> list[Row]:
    """Every torch with the newest Python that it has wheels for and that is here; every Python with one torch."""
    rows = []
    for torch, newest in NEWEST_PYTHON.items():
        there = [python for python in PYTHONS if python in interpreters and order(python) <= order(newest)]
        rows.append(Row(torch, there[-1] if there else newest))
    rows += [Row(TORCH_OF_EVERY_PYTHON, python) for python in PYTHONS]
    return list(dict.fromkeys(rows))


def order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def patterns_of(row: Row) -> tuple[str, ...]:
    """Of the files of tests for this row."""
    return (*TESTS, *LMS_TESTS) if order(row.torch) >= order(LMS_FROM) else TESTS


def copy_sources() -> str:
    """Copies the working tree to build/matrix/source, if it changed since the last copy; the digest of it."""
    list_files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(list_files, cwd=ROOT, capture_output=True, check=True)
    files = sorted({name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()})
    digest = hashlib.sha256()
    for name in files:
        if name.startswith(SOURCES):
            digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    key = digest.hexdigest()[:12]
    stamp = WORK / "source" / ".copied"
    if not stamp.is_file() or stamp.read_text() != key:
        for stale in (WORK / "source", WORK / "wheels"):
            shutil.rmtree(stale, ignore_errors=True)
        for name in files:
            (WORK / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, WORK / "source" / name)
        stamp.write_text(key)
    return key


def run(command: Sequence[object], log: Path, seconds: float, **changes: str) -> int:
    """Runs it in the copy of the sources, output to the end of the log; its exit status, 124 where it ran too long."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("EBBTIDE_", "PYTHON"))}
    with log.open("a") as output:
        print("$", *command, file=output, flush=True)
        try:
            return subprocess.run(
                [str(part) for part in command],
                cwd=WORK / "source",
                env={**environment, **changes},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            print(f"ended after {seconds} s", file=output)
            return 124


def must(command: Sequence[object], log: Path, seconds: float, **changes: str) -> None:
    status = run(command, log, seconds, **changes)
    if status != 0:
        raise SetupError(f"`{' '.join(map(str, command[:6]))} ...` ended with status {status}: see {log}")


def pip(environment: Path) -> list[object]:
    return [environment / "bin/python", "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", "--quiet"]


def build_wheel(interpreter: Path, python: str, sources: str, log: Path) -> Path:
    """ebbtide's wheel for this Python, which serves every torch; built once for the same sources."""
    folder = WORK / "wheels" / f"{sources}-py{python}"
    if not list(folder.glob("*.whl")):
        tools = WORK / "environments" / f"build-py{python}"
        if not (tools / ".ready").is_file():
            shutil.rmtree(tools, ignore_errors=True)
            must([interpreter, "-m", "venv", tools], log, INSTALL_SECONDS)
            must([*pip(tools), "install", "-r", "requirements/build.txt"], log, INSTALL_SECONDS)
            (tools / ".ready").touch()
        build = f"--config-settings=build-dir={WORK / 'cmake'}-py{python}"
        scratch = folder.with_name(f"{folder.name}-new")
        must(
            [*pip(tools), "wheel", "--no-build-isolation", "--no-deps", build, "--wheel-dir", scratch, "."],
            log,
            BUILD_SECONDS,
            PATH=f"{tools / 'bin'}:{os.environ['PATH']}",
        )
        scratch.rename(folder)
    return next(folder.glob("*.whl"))


def make_environment(row: Row, interpreter: Path, log: Path) -> str:
    """A fresh environment with this torch, or one that an interrupted run left; "", or why there is no such torch."""
    environment = WORK / "environments" / row.name
    if (environment / ".torch").is_file():
        return ""
    shutil.rmtree(environment, ignore_errors=True)
    room = shutil.disk_usage(WORK).free
    if room < LEAST_ROOM_BYTES:
        raise SetupError(f"{room >> 30} GiB are free under {WORK}, and a row may take {LEAST_ROOM_BYTES >> 30}")
    must([interpreter, "-m", "venv", environment], log, INSTALL_SECONDS)
    begin = log.stat().st_size
    if run([*pip(environment), "install", f"torch=={row.torch}"], log, INSTALL_SECONDS) != 0:
        said = log.read_text(errors="replace")[begin:]
        if "No matching distribution found for torch==" in said and "from versions: none" not in said:
            return "no such wheel"
        raise SetupError(f"torch {row.torch} was not installed: see {log}")
    (environment / ".torch").touch()
    return ""


def run_tests(row: Row, sources: str, wheel: Path, log: Path, jobs: int) -> Result:
    environment = WORK / "environments" / row.name
    must([*pip(environment), "install", "-r", "requirements/test.txt"], log, INSTALL_SECONDS)
    must([*pip(environment), "install", "--no-deps", "--force-reinstall", wheel], log, INSTALL_SECONDS)
    folder = WORK / "source" / "tests" / "python"
    found = {path for pattern in patterns_of(row) for path in folder.glob(pattern) if path.name not in LEFT_OUT}
    tests = sorted(path.relative_to(WORK / "source") for path in found)
    report = WORK / "logs" / f"{row.name}.xml"
    report.unlink(missing_ok=True)
    changes = {
        "EBBTIDE_DRIVER": "sim",
        "EBBTIDE_CACHE_DIR": str(environment / "cache"),
        "OMP_WAIT_POLICY": "passive",
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
    }
    start = time.monotonic()
    result = Result(row.torch, row.python, sources)
    said = subprocess.run([environment / "bin/python", "-c", VERSIONS], capture_output=True, text=True, check=False)
    if said.returncode != 0:
        raise SetupError(f"torch {row.torch} does not import: {said.stderr[-500:]}")
    result.installed_torch, result.cuda, result.full_python = said.stdout.strip().split("|")
    # Ahead of the tests, whose own time limits know nothing of a compiler.
    if run([environment / "bin/python", "-c", FIRST_REGION], log, BUILD_SECONDS, **changes) != 0:
        result.reason, result.failed = "the first region failed", 1
        return result
    pytest = [environment / "bin/python", "-m", "pytest", "-q", "--tb=short", "--timeout=600"]
    beside = ["-n", jobs, "--dist", "loadfile"] if jobs > 1 else []
    settings = ["-p", "no:cacheprovider", "--durations=20"]
    status = run(
        [*pytest, *settings, *beside, f"--junitxml={report}", *tests],
        log,
        TEST_SECONDS,
        **changes,
    )
    result.seconds = round(time.monotonic() - start, 1)
    if status not in (0, 1) or not report.is_file():
        result.reason = f"pytest ended with status {status}"
    if report.is_file():
        read_report(report, result)
    return result


def read_report(report: Path, result: Result) -> None:
    """Counts and names from pytest's XML."""
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            result.failures.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            result.skipped += 1
        else:
            result.passed += 1
    result.failed = len(result.failures)


def try_row(row: Row, interpreters: Mapping[str, Path], sources: str, options: argparse.Namespace) -> Result:
    if row.python not in interpreters:
        return Result(row.torch, row.python, sources, reason="no interpreter here")
    log = WORK / "logs" / f"{row.name}.log"
    log.write_text("")
    wheel = build_wheel(interpreters[row.python], row.python, sources, log)
    missing = make_environment(row, interpreters[row.python], log)
    result = (
        Result(row.torch, row.python, sources, reason=missing)
        if missing
        else run_tests(row, sources, wheel, log, options.jobs)
    )
    if not options.keep:
        shutil.rmtree(WORK / "environments" / row.name, ignore_errors=True)
    return result


def read_result(row: Row, sources: str) -> Result | None:
    """The result of the row with these sources, if there is one."""
    path = WORK / "results" / f"{row.name}.json"
    result = Result(**json.loads(path.read_text())) if path.is_file() else None
    return result if result is not None and result.sources == sources else None


def describe(result: Result) -> str:
    if result.reason and not result.passed and not result.failed:
        return f"untried: {result.reason}"
    shown = [*result.failures[:3], *(["..."] if len(result.failures) > 3 else [])]
    names = f" ({', '.join(shown)})" if shown else ""
    reason = f"; {result.reason}" if result.reason else ""
    return f"{result.passed} passed, {result.failed} failed{names}, {result.skipped} skipped{reason}"


def make_line(result: Result) -> str:
    build = "" if not result.installed_torch else f"CUDA {result.cuda}" if result.cuda else "CPU"
    cells = (result.torch, build, result.full_python or result.python, describe(result), result.day)
    return f"| {' | '.join(cells)} |"


def split_page() -> tuple[str, str, str]:
    """The page before the table, the table, and the page after it."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    if not after:
        raise ValueError(f"{PAGE} lacks the lines {BEGIN} and {END}")
    return before, table, after


def read_lines(table: str) -> dict[Row, str]:
    """The line of each row that a table has."""
    found = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0][:1].isdigit():
            found[Row(cells[0], ".".join(cells[2].split(".")[:2]))] = line
    return found


def make_table(rows: Sequence[Row], lines: Mapping[Row, str]) -> str:
    found = [lines.get(row, f"| {row.torch} |  | {row.python} | untried: not run yet |  |") for row in rows]
    head = ["| torch | build | Python | tests | day |", "|---|---|---|---|---|"]
    return "\n".join([*head, *found, "", f"{platform.system()} {platform.machine()}, no GPU."])


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rows", default="", help="those whose name has one of these words: 2.6.0,py3.10")
    parser.add_argument("--list", action="store_true", help="name the rows and their results, and end")
    parser.add_argument("--again", action="store_true", help="also rows that have a result for these sources")
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    parser.add_argument("--jobs", type=int, default=2, help="processes for the tests of a row")
    parser.add_argument("--python", action="append", default=[], help="an interpreter that is not on PATH")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs then ends too
    for folder in ("results", "logs", "environments", "wheels"):
        (WORK / folder).mkdir(parents=True, exist_ok=True)
    lock = (WORK / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with this process
    except OSError:
        print(f"another `make matrix` is under way in {WORK}", file=sys.stderr)
        return 1
    interpreters = find_interpreters(PYTHONS, options.python)
    sources = copy_sources()
    every_row = choose_rows(interpreters)
    words = [word for word in options.rows.split(",") if word]
    unsure = []
    for row in every_row:
        known = read_result(row, sources)
        is_wanted = not words or any(word in f"{row.name}-" for word in words)
        if options.list or not is_wanted or (known is not None and not options.again):
            print(f"{row.name}: {describe(known) if known else 'no result'}", flush=True)
            continue
        print(f"{row.name}: ...", flush=True)
        try:
            result = try_row(row, interpreters, sources, options)
        except SetupError as error:
            unsure.append(row.name)
            print(f"{row.name}: could not be tried: {error}", flush=True)
            continue
        (WORK / "results" / f"{row.name}.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
        print(f"{row.name}: {describe(result)}", flush=True)
    found = {row: result for row in every_row if (result := read_result(row, sources)) is not None}
    if found and not options.list:
        before, table, after = split_page()
        table = make_table(every_row, {**read_lines(table), **{row: make_line(found[row]) for row in found}})
        PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")
        print(f"\n{table}\n\nwritten to {PAGE.relative_to(ROOT)}")
    return 1 if unsure or any(result.failed or result.reason.startswith("pytest") for result in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
