"""Which tests are asked, and in which order: those that name the unit, all C++ tests, the room's Python tests.

The sweeps, which fail every driver call of an operation in turn or walk at random, come last: they take ten times as
long as all others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

TEST = re.compile(r"^TEST(?:_[FP])?\((\w+),\s*(\w+)\)", re.MULTILINE)
# Most suites of TEST_P stand behind a prefix, and every one before a parameter.
NAMED = r"(^|/)({})(/|$)"
SWEEPS = "the sweeps"
PROGRAM = ("ebbtide_tests",)
# The libraries that the C and the Python tests load.
PRODUCTS = ("ebbtide", "ebbtide_preload", "ebbtide_sim", "_core")

_SAVER = (
    "tests/python/test_saver_operations.py",
    "tests/python/test_saver_pending.py",
    "tests/python/test_saver_overflow.py",
    "tests/python/test_saver_backup_of.py",
)
_INTERFACE = (
    "tests/python/test_core_process.py",
    "tests/python/test_saver_errors.py",
    "tests/python/test_saver_settings.py",
    "tests/python/test_saver_trim.py",
    "tests/python/test_saver_prepare.py",
    "tests/python/test_saver_swap.py",
    "tests/python/test_core_walk.py",
    "tests/python/test_cli.py",
    *_SAVER,
)
_LMS = (
    "tests/python/test_lms.py",
    "tests/python/test_lms_saved_hooks.py",
    "tests/python/test_lms_plan.py",
    "tests/python/test_lms_states.py",
    "tests/python/test_lms_states_troubles.py",
    "tests/python/test_lms_weight_uses.py",
    "tests/python/test_lms_weights.py",
    "tests/python/test_lms_weights_training.py",
    "tests/python/test_lms_surface.py",
    "tests/python/test_lms_troubles.py",
    "tests/python/test_lms_meets.py",
)
# A short list for each room, or folder of a room. Rooms without one have _SAVER's.
PYTHON_TESTS: Mapping[str, tuple[str, ...]] = {
    "api": _INTERFACE,
    "bindings": (*_INTERFACE, "tests/python/test_saver_region_mixups.py"),
    "compat": (
        "tests/python/test_tms_backups.py",
        "tests/python/test_tms_callers.py",
        "tests/python/test_tms_module.py",
        "tests/python/test_tms_ways_in.py",
    ),
    "driver": (
        "tests/conformance",
        "tests/python/test_core_process.py",
        "tests/python/test_saver_driver_choice.py",
        "tests/preload",
        *_SAVER,
    ),
    "kernels": ("tests/conformance/test_conformance_kernels.py", "tests/python/test_saver_skips.py", *_SAVER),
    "preload": (
        "tests/preload/test_preload_report.py",
        "tests/preload/test_preload_per_thread.py",
        "tests/preload/test_preload_pauseable.py",
        "tests/preload/test_preload_peers.py",
        "tests/preload/test_preload_process.py",
        "tests/preload/test_preload_overflow.py",
        "tests/preload/test_preload_resolution.py",
        "tests/python/test_preloading.py",
    ),
    "lms": _LMS,
    "sim": ("tests/conformance", *_SAVER),
    "torch": (
        "tests/python/test_torch_cpu_regions.py",
        "tests/python/test_torch_cpu_process.py",
        "tests/python/test_torch_cpu_deleters.py",
        "tests/python/test_saver_regions.py",
        "tests/python/test_saver_threads.py",
        *_SAVER,
    ),
    "torch/lms": _LMS,
}
TORCH = re.compile(r"^#include <(torch|c10|ATen|pybind11)/", re.MULTILINE)
# Rooms that the C++ test program does not contain.
NOT_IN_CPP_TESTS = frozenset({"bindings", "preload"})


@dataclass(frozen=True)
class Stage:
    """One question: some tests, stopped at the first failure.

    Attributes:
        name: the name of the test in reports.
        targets: the targets that are built first.
        tool: the command of ctest or of pytest, without a choice of tests.
        chosen: of ctest a regular expression, or nothing for all; of pytest files or tests.
        left_out: of ctest regular expressions, of pytest tests.
    """

    name: str
    targets: tuple[str, ...]
    tool: tuple[str, ...]
    chosen: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def is_ctest(self) -> bool:
        return self.tool[0] == "ctest"

    @property
    def command(self) -> tuple[str, ...]:
        if not self.is_ctest:
            return (*self.tool, *(f"--deselect={test}" for test in self.left_out), *self.chosen)
        choice = [part for regex in self.chosen for part in ("--tests-regex", regex)]
        return (*self.tool, *choice, *(("--exclude-regex", "|".join(self.left_out)) if self.left_out else ()))

    def only(self, test: str) -> Stage:
        return replace(self, chosen=(self._choice(test),), left_out=())

    def without(self, tests: Iterable[str]) -> Stage:
        return replace(self, left_out=(*self.left_out, *map(self._choice, tests)))

    def _choice(self, test: str) -> str:
        return f"^{re.escape(test)}$" if self.is_ctest else test


def is_sweep(file: Path) -> bool:
    return "fault" in file.stem or "walk" in file.stem


def find_tests(files: Iterable[Path]) -> list[str]:
    return sorted({".".join(match) for file in files for match in TEST.findall(file.read_text())})


def tests_that_name(tree: Path, path: str) -> list[str]:
    """The C++ tests, no sweeps, of each file that includes the unit's header, is called like it, or names its type."""
    unit = Path(path)
    stem = unit.stem
    headers = {unit.with_suffix(".h")}
    # registry_claim.cpp has its declarations in registry.h.
    beside = (tree / unit.parent).glob("*.h")
    headers.update(unit.parent / header.name for header in beside if stem.startswith(header.stem + "_"))
    includes = [re.escape(header.relative_to(unit.parts[0]).as_posix()) for header in headers]
    types = ["".join(word.capitalize() for word in header.stem.split("_")) for header in headers]
    # A member is called like its class; a single word means too much.
    members = [header.stem for header in headers if "_" in header.stem]
    mention = re.compile("|".join([*includes, *(rf"\b{name}\b" for name in types + members)]))
    files = (tree / "tests" / "cpp").glob("*.cpp")
    return find_tests(f for f in files if not is_sweep(f) and (stem in f.stem or mention.search(f.read_text())))


def match_names(names: list[str]) -> str:
    """A regular expression for ctest."""
    return NAMED.format("|".join(re.escape(name) for name in names))


def python_tests(path: str) -> tuple[str, ...]:
    """Of the folder in csrc that is nearest to this file and has a list."""
    folder = Path(path).parent.relative_to("csrc")
    names = (each.as_posix() for each in (folder, *folder.parents))
    return next((PYTHON_TESTS[name] for name in names if name in PYTHON_TESTS), _SAVER)


def make_stages(tree: Path, path: str, ctest: tuple[str, ...], pytest: tuple[str, ...]) -> list[Stage]:
    """The tests of a mutant of this file, the likeliest and cheapest first."""
    room = path.split("/")[1]
    named = tests_that_name(tree, path)
    sweeps = find_tests(file for file in (tree / "tests" / "cpp").glob("*.cpp") if is_sweep(file))
    python = [file for file in python_tests(path) if (tree / file).exists()]
    # The C++ tests call no function of the C interface, and contain nothing that wants torch.
    wants_torch = path.startswith("csrc/torch/lms/") or TORCH.search((tree / path).read_text()) is not None
    is_in_program = room not in NOT_IN_CPP_TESTS and room != "api" and not wants_torch
    is_c_test = r"^c\."
    stages = []
    if named and not wants_torch:
        stages.append(Stage("the tests that name it", PROGRAM, ctest, (match_names(named),)))
    if is_in_program:
        others = (is_c_test, *((match_names(sweeps),) if sweeps else ()))
        stages.append(Stage("the C++ tests", PROGRAM, ctest, left_out=others))
    if room not in NOT_IN_CPP_TESTS:
        stages.append(Stage("the C tests", PRODUCTS, ctest, (is_c_test,)))
    if python:
        stages.append(Stage("the Python tests", PRODUCTS, pytest, tuple(python)))
    if is_in_program and sweeps:
        stages.append(Stage(SWEEPS, PROGRAM, ctest, (match_names(sweeps),)))
    return stages
