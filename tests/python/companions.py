"""Other processes with the saver, for a test to talk to."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def sharing(name: str, capacity_mib: int) -> Iterator[dict[str, str]]:
    """The variables of processes that share a simulated device, and a folder of their own."""
    name = f"{name}-{os.getpid()}"
    with tempfile.TemporaryDirectory() as path:  # pytest's own are too long for the address of a socket
        yield {
            "EBBTIDE_DRIVER": "sim",
            "EBBTIDE_SIM_SHARED": name,
            "EBBTIDE_SIM_CAPACITY": f"{capacity_mib}MiB",
            "EBBTIDE_SHARED": "1",
            "EBBTIDE_SHARED_FOLDER": f"{path}/place",
        }
    Path(f"/dev/shm/ebbtide-sim-{os.geteuid()}-{name}").unlink(missing_ok=True)


LOOP = """
import json, sys, traceback
import torch
from ebbtide import saver
print("ready", flush=True)
names = {"torch": torch, "saver": saver}
for line in sys.stdin:
    try:
        exec(json.loads(line), names)
        answer = names.pop("answer", None)
    except Exception as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(answer), flush=True)
"""


class Companion:
    """Runs code that it is sent, in one namespace which has `torch` and `saver`. What the code calls `answer` comes
    back, or {"error": name, "text": message}."""

    def __init__(self, **variables: str) -> None:
        self._variables = variables
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **self._variables},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> "Companion":
        assert self._process.stdout is not None
        assert self.has_answered(120), "it does not start"
        assert self._process.stdout.readline() == "ready\n", self.errors()
        return self

    def start(self, code: str) -> None:
        assert self._process.stdin is not None
        print(json.dumps(textwrap.dedent(code)), file=self._process.stdin, flush=True)

    def has_answered(self, seconds: float = 0) -> bool:
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def answer(self) -> object:
        assert self._process.stdout is not None and self.has_answered(60)
        return json.loads(self._process.stdout.readline())

    def run(self, code: str) -> object:
        self.start(code)
        return self.answer()

    def run_until(self, code: str, wanted: object, seconds: float = 10) -> object:
        """Again, until it answers so, or for so long."""
        deadline = time.monotonic() + seconds
        while (found := self.run(code)) != wanted and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        """Returns when all its threads stand still, until `go_on`."""
        os.kill(self.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        while any(" T " not in (each / "stat").read_text() for each in tasks.iterdir()):
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def revive(self) -> None:
        """Anew, with nothing, where a test has killed it."""
        if self.poll() is not None:
            self._process.communicate()
            self._start()
            self.wait_until_ready()

    def errors(self) -> str:
        """What it wrote to stderr; ends it."""
        return self._process.communicate()[1]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def running(count: int, variables: dict[str, str]) -> Iterator[list[Companion]]:
    """So many, from their beginning to their end."""
    made = [Companion(**variables) for _ in range(count)]
    for one in made:
        one.wait_until_ready()
    yield made
    for one in made:
        one.close()


@contextlib.contextmanager
def pair(name: str, capacity_mib: int) -> Iterator[list[Companion]]:
    """Two that share a simulated device."""
    with sharing(name, capacity_mib) as variables, running(2, variables) as made:
        yield made
