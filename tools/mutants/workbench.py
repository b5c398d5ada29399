"""Where mutants are built and tried: a copy of the tree with a build of its own. The user's sources are only read."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .operators import Mutation
from .plan import PROGRAM, SWEEPS, Stage, make_stages

# Of a stage, before a mutant is said to hang. Each test has a limit of its own, far below.
TIMEOUT_S = 1800
# Tests that may fail on the unbroken tree, and are left out.
MOST_FAILING = 5


class BaselineError(Exception):
    """The unbroken tree does not build, or its tests fail: no mutant could be told from it."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        outcome: "killed", "survived" or "not compiled".
        by: the stage that noticed, and the test where it is known.
    """

    outcome: str
    by: str
    seconds: float


def run(
    command: list[str], folder: Path, environment: dict[str, str], log: Path, timeout_s: float | None
) -> int | None:
    """The exit status, or None where it ran too long: then all that it started is gone as well."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Workbench:
    """A copy of the repository under `place`, built by CMake and Ninja.

    A mutant is killed by a test that passes on the unbroken tree. One that fails there is left out from then on.

    Args:
        root: the repository.
        place: a folder for the copy, the build and the package; kept from run to run.
        with_sweeps: ask the sweeps as well about mutants that no other test has noticed.
        options: further arguments of CMake's configuration.
    """

    def __init__(self, root: Path, place: Path, jobs: int, with_sweeps: bool, options: tuple[str, ...] = ()) -> None:
        self.root, self.place, self.jobs, self.with_sweeps, self.options = root, place, jobs, with_sweeps, options
        self.tree, self.build, self.site = place / "tree", place / "build", place / "site"
        self.log = place / "last.log"
        tools = str(Path(sys.executable).parent)
        paths = [str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = os.environ | {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(paths),
            # Otherwise a library that is less than a second newer than the installed one is left out.
            "CMAKE_INSTALL_ALWAYS": "1",
        }
        self.failing: list[str] = []  # tests, on the unbroken tree
        self._passing: set[tuple[str, str]] = set()  # stages and tests that were asked there

    # --- the copy ---------------------------------------------------------------------------------------------------

    def copy_sources(self) -> None:
        """Brings the copy up to date; files that did not change keep their time, so that nothing is built in vain."""
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=self.root, check=True, capture_output=True, text=True).stdout.split("\0")
        wanted = {name for name in names if name and (self.root / name).is_file()}
        for name in wanted:
            source, copy = self.root / name, self.tree / name
            if not copy.is_file() or copy.read_bytes() != source.read_bytes():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)
                shutil.copymode(source, copy)
        for copy in self.tree.rglob("*"):
            if copy.is_file() and copy.relative_to(self.tree).as_posix() not in wanted:
                copy.unlink()

    def configure(self) -> None:
        command = ["cmake", "-G", "Ninja", "-S", str(self.tree), "-B", str(self.build), "-DEBBTIDE_TESTS=ON"]
        # Optimised enough that the tests are quick. A library that changes is not linked into its users again.
        command += ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", "-DCMAKE_LINK_DEPENDS_NO_SHARED=ON"]
        command += ["-DEBBTIDE_TEST_TIMEOUT_S=300"]  # a machine that is busy is not a mutant that hangs
        command += [f"-DPython_EXECUTABLE={sys.executable}", *self.options]
        if shutil.which("ccache"):
            command += [f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("C", "CXX")]
        if run(command, self.place, self.environment, self.log, None) != 0:
            raise BaselineError(f"CMake does not configure the copy: {self.log} says why")

    def prepare(self) -> None:
        """A copy, built and installed, with nothing broken. Raises BaselineError."""
        self.place.mkdir(parents=True, exist_ok=True)
        self._own_place = (self.place / "lock").open("w")
        try:
            fcntl.flock(self._own_place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BaselineError(f"another run works in {self.place}: wait for it, or give --place") from None
        self.copy_sources()
        if (self.tree / "python").is_dir():
            shutil.copytree(self.tree / "python", self.site, dirs_exist_ok=True)
        self.configure()
        if not self.make():
            raise BaselineError(f"the unbroken tree does not build: {self.log} says why")

    # --- building and asking ----------------------------------------------------------------------------------------

    def make(self, targets: tuple[str, ...] = ()) -> bool:
        """Builds these targets, or everything; the products are installed beside the Python sources."""
        command = ["cmake", "--build", str(self.build), "--parallel", str(self.jobs)]
        command += ["--target", *targets] if targets else []
        if run(command, self.place, self.environment, self.log, None) != 0:
            return False
        if targets == PROGRAM:
            return True
        install = ["cmake", "--install", str(self.build), "--prefix", str(self.site)]
        return run(install, self.place, self.environment, self.log, None) == 0

    def stages(self, path: str) -> list[Stage]:
        ctest = ("ctest", "--test-dir", str(self.build), "--stop-on-failure", "--no-tests=error", "--parallel")
        pytest = (sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "--timeout=300")
        stages = make_stages(self.tree, path, (*ctest, str(self.jobs)), pytest)
        return [stage.without(self.failing) for stage in stages if self.with_sweeps or stage.name != SWEEPS]

    def ask(self, stage: Stage) -> int | None:
        failures = self.build / "Testing" / "Temporary" / "LastTestsFailed.log"
        failures.unlink(missing_ok=True)
        return run(list(stage.command), self.tree, self.environment, self.log, TIMEOUT_S)

    def find_culprit(self) -> str:
        """The first test that failed, as far as the tools say."""
        failures = self.build / "Testing" / "Temporary" / "LastTestsFailed.log"
        if failures.is_file():
            return failures.read_text().splitlines()[0].partition(":")[2]
        failed = [line for line in self.log.read_text().splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return failed[0].split()[1] if failed else ""

    def judge(self, mutation: Mutation) -> Verdict:
        """Plants the mutation, asks every stage until one fails, and takes it out again. Raises BaselineError."""
        begin = time.monotonic()
        while True:
            outcome, stage, culprit = self._ask_broken(mutation)
            if stage is None or self._passes_unbroken(stage, culprit):
                by = f"{stage.name}: {culprit}".rstrip(": ") if stage is not None else ""
                return Verdict(outcome, by, time.monotonic() - begin)
            self._leave_out(stage, culprit)

    def _ask_broken(self, mutation: Mutation) -> tuple[str, Stage | None, str]:
        file = self.tree / mutation.path
        source = file.read_text()
        file.write_text(mutation.apply(source))
        try:
            for stage in self.stages(mutation.path):
                if not self.make(stage.targets):
                    return "not compiled", None, ""
                status = self.ask(stage)
                if status != 0:
                    return "killed", stage, "" if status is None else self.find_culprit()
            return "survived", None, ""
        finally:
            # With a new time: the objects of the mutant are stale.
            file.write_text(source)

    def _passes_unbroken(self, stage: Stage, culprit: str) -> bool:
        """Whether the test passes, or all of the stage where it is not known which one failed."""
        if (stage.name, culprit) in self._passing:
            return True
        if not self.make(stage.targets):
            raise BaselineError(f"the unbroken tree does not build: {self.log} says why")
        if self.ask(stage.only(culprit) if culprit else stage) != 0:
            return False
        self._passing.add((stage.name, culprit))
        return True

    def _leave_out(self, stage: Stage, culprit: str) -> None:
        self.failing.append(culprit)
        if not culprit or len(self.failing) > MOST_FAILING:
            names = ", ".join(filter(None, self.failing))
            raise BaselineError(f"{stage.name} fail on the unbroken tree: {names or f'{self.log} says why'}")
